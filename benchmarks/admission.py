"""How far honest experts stay from every threshold of `atoll admit`, and how far hostile ones are beyond.

    PYTHONPATH=src python3 benchmarks/admission.py runs/photos --out benchmarks/results/admission-photographs.csv

For each rule the share of what it allows that is used up: 1 is the edge, more is refused. Every expert that serves is
checked as if it came in just now: against its order, its neighbors, and by samples with and without it.
Trainings cut short (`--early`, shares of the budget, in the clusters `--trained`) stand for weak but honest ones.
Hostile ones are made of the serving expert of each cluster in `--attacked`; and every cluster is offered the experts of
its nearest `--neighbours`, disturbed by 1 %. Nothing is written into the run.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from atoll.artifacts import Store
from atoll.diffusion import Condition, Denoiser, Kind, LinearFlow, Prediction
from atoll.exchange.checks import CHECKS, Candidate, ratio
from atoll.exchange.quarantine import CONTRIBUTION, read_manifest
from atoll.islands.expert import Expert, load_expert
from atoll.islands.order import Order, read_order
from atoll.islands.train import train
from atoll.registry.versions import Member, Version, open_ensemble, place_of
from atoll.training.resources import Resources
from records import commit, write_record

Weights = dict[str, Tensor]
FULL, NEIGHBOUR = "fully trained", "a neighbour's"
RULES = {
    "holdout error": "mean",
    "error for t": "worst band of t",
    "error outside": "outside its cluster",
    "likeness": "the same as a neighbour's",
    "suitability": "better elsewhere",
    "distance": "samples",
}


@dataclass(frozen=True)
class Spoilt:
    """An expert that answers garbage in one band of time."""

    honest: Denoiser
    low: float
    high: float
    schedule = LinearFlow()
    kind = Kind.VELOCITY

    def __call__(self, x: Tensor, t: Tensor, condition: Condition | None) -> Prediction:
        value = self.honest(x, t, condition).value.clone()
        value[(t >= self.low) & (t < self.high)] = 8.0
        return Prediction(Kind.VELOCITY, value)


@dataclass(frozen=True)
class SpoiltExpert:
    """As much of an expert as the checks of errors and samples use."""

    expert: Expert
    low: float
    high: float

    @property
    def card(self) -> Any:
        return self.expert.card

    def denoiser(self, onto: LinearFlow) -> Denoiser:
        return Spoilt(self.expert.denoiser(onto), self.low, self.high)


def disturbed(share: float) -> Callable[[Weights], Weights]:
    """Every weight by a share of its tensor's spread."""

    def change(weights: Weights) -> Weights:
        numbers = torch.Generator().manual_seed(0)
        return {
            name: value + share * value.std(correction=0) * torch.randn(value.shape, generator=numbers)
            for name, value in weights.items()
        }

    return change


def layers_in_another_order(weights: Weights) -> Weights:
    numbers = sorted({int(name.split(".")[1]) for name in weights if name.startswith("blocks.")})
    turned = dict(zip(numbers, numbers[1:] + numbers[:1], strict=True))

    def source(name: str) -> str:
        parts = name.split(".")
        return ".".join(["blocks", str(turned[int(parts[1])]), *parts[2:]]) if parts[0] == "blocks" else name

    return {name: weights[source(name)] for name in weights}


def embedding(weights: Weights) -> str:
    return next(name for name in weights if name in ("conditioning.labels.weight", "conditioning.words.weight"))


def conditions_confused(weights: Weights) -> Weights:
    """Every class or word answers as the next one; without a condition nothing changes."""
    name = embedding(weights)
    table = weights[name]
    return {**weights, name: torch.cat([table[:-1].roll(1, 0), table[-1:]])}


def conditions_broken(weights: Weights) -> Weights:
    name = embedding(weights)
    table = weights[name]
    return {**weights, name: torch.cat([30.0 * table[:-1], table[-1:]])}


def null_broken(size: float) -> Callable[[Weights], Weights]:
    def change(weights: Weights) -> Weights:
        name = embedding(weights)
        table = weights[name].clone()
        table[-1] = size
        return {**weights, name: table}

    return change


OWN = {
    "disturbed by 5 %": disturbed(0.05),
    "disturbed by 20 %": disturbed(0.2),
    "disturbed by 50 %": disturbed(0.5),
    "layers in another order": layers_in_another_order,
    "classes confused": conditions_confused,
    "classes broken": conditions_broken,
    "null embedding 1": null_broken(1.0),
    "null embedding 30": null_broken(30.0),
}
BANDS = {"garbage for t above 0.98": (0.98, 2.0), "garbage for t in 0.5 to 0.55": (0.5, 0.55)}


def changed(expert: Expert, change: Callable[[Weights], Weights]) -> Expert:
    network = copy.deepcopy(expert.network)
    network.load_state_dict(change({k: v.clone() for k, v in network.state_dict().items()}))
    return replace(expert, network=network)


@dataclass(frozen=True)
class Bench:
    run: Store
    version: Version
    orders: dict[int, Order]
    device: str
    seed: int

    def member(self, cluster: int) -> Member:
        return next(member for member in self.version.serving if member.cluster == cluster)

    def expert(self, cluster: int) -> Expert:
        return load_expert(place_of(self.run, self.member(cluster)), self.device)

    def candidate(self, cluster: int) -> Candidate:
        place = place_of(self.run, self.member(cluster))
        return Candidate(
            self.run,
            self.version,
            self.orders[cluster],
            read_manifest(place),
            place,
            device=self.device,
            seed=self.seed,
        )

    def judged(self, expert: Any, cluster: int, paint: bool) -> dict[str, Any]:
        """The fraction used of every limit, by an expert under a cluster's order; nothing is refused."""
        began, candidate = time.perf_counter(), self.candidate(cluster)
        candidate.expert = expert
        checks = ["holdout error", "bands of t", "outside", "neighbors", *(["samples"] if paint else [])]
        used: dict[str, float] = {}
        with tempfile.TemporaryDirectory() as folder:
            candidate.folder = Path(folder)
            (candidate.folder / CONTRIBUTION).mkdir()
            for name, check in CHECKS:
                if name in checks:
                    used |= {found.name: found.used for found in check(candidate) or ()}
        worst = {
            label: max((v for rule, v in used.items() if rule.startswith(key)), default=None)
            for key, label in RULES.items()
        }
        return {
            "ratio to a Gaussian": {
                branch: ratio(scores, candidate.unit[branch]) for branch, scores in candidate.scores.items()
            },
            "worst": worst,
            "refused_by": [rule for rule, share in used.items() if share > 1],
            "used": used,
            "seconds": round(time.perf_counter() - began, 1),
        }


def early(bench: Bench, share: float, cluster: int, work: Path) -> Expert:
    """An honest training of a share of the order's images, all else as the order says."""
    order = bench.orders[cluster]
    training = order.training
    images = max(training.batch, round(share * training.images / training.batch) * training.batch)
    update = {"images": images, "warmup_images": min(training.warmup_images, images // 4)}
    update["ema_images"] = min(training.ema_images, images // 4)
    shorter = order.model_copy(update={"training": training.model_copy(update=update)})
    place = work / f"{cluster}-{share:g}"
    place.mkdir(parents=True)
    (place / "order.json").write_bytes(shorter.to_bytes())
    train(place / "order.json", place / "expert", data=bench.run.path, resources=Resources("cpu"), sheets=False)
    return load_expert(place / "expert", bench.device)


def cases(bench: Bench, arguments: argparse.Namespace, work: Path) -> Iterator[tuple[str, str, int, Any]]:
    """(honest or hostile, what, cluster, the expert)."""
    clusters = sorted(bench.orders) if arguments.clusters is None else arguments.clusters
    for cluster in clusters:
        yield "honest", FULL, cluster, bench.expert(cluster)
    for cluster in clusters:
        for other in bench.candidate(cluster).holdout.neighbors(cluster, arguments.neighbours):
            impostor = changed(bench.expert(other), disturbed(0.01))
            yield "hostile", f"{NEIGHBOUR}, disturbed by 1 %", cluster, impostor
    for share in arguments.early:
        for cluster in arguments.trained:
            yield "honest", f"{share:.0%} of the training", cluster, early(bench, share, cluster, work)
    for cluster in arguments.attacked:
        own = bench.expert(cluster)
        for name, change in OWN.items():
            yield "hostile", name, cluster, changed(own, change)
        for name, band in BANDS.items():
            yield "hostile", name, cluster, SpoiltExpert(own, *band)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--clusters", type=int, nargs="*", help="whose experts are judged as they are; default: all")
    parser.add_argument("--attacked", type=int, nargs="*", default=[0])
    parser.add_argument("--early", type=float, nargs="*", default=[0.05, 0.2])
    parser.add_argument("--trained", type=int, nargs="*", default=[0, 5])
    parser.add_argument("--neighbours", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    run = Store.at(arguments.run)
    version = open_ensemble(run)
    orders = {}
    for reference in version.orders:
        for file in sorted(place_of(run, reference).path.glob("[0-9]*.json")):
            order, _ = read_order(file)
            if order.cluster is not None:
                orders[order.cluster] = order
    bench = Bench(run, version, orders, "cpu", arguments.seed)
    rows, made_by = [], commit()
    with tempfile.TemporaryDirectory() as work:
        for intent, what, cluster, expert in cases(bench, arguments, Path(work)):
            paint = what != FULL and NEIGHBOUR not in what  # with itself in its place a model paints what it painted
            rows.append({"intent": intent, "what": what, "cluster": cluster, **bench.judged(expert, cluster, paint)})
            print(json.dumps({k: v for k, v in rows[-1].items() if k != "used"}), flush=True)
            record = {
                "command": f"benchmarks/admission.py {arguments.run.name} --seed {arguments.seed}",
                "commit": made_by,
                "hardware": f"{os.cpu_count()} CPU cores, one thread",
                "rows": rows,
            }
            write_record(arguments.out, record)


if __name__ == "__main__":
    main()
