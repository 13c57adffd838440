"""Students of the demo's ensembles, beside the ensembles, a monolith, and a student that learned from data alone.

    python benchmarks/distill.py --out benchmarks/results/distill.json [--seeds 0 1 2] [--work FOLDER]
    python benchmarks/distill.py --size tiny --seeds 0 --out /tmp/distill.json     to see that this script works

For every seed: the demo with a monolith (two DDPM and six flow experts), the same with eight flow experts, and these
students, all of an expert's architecture:

    mixed       the default: a quarter of a monolith's batch, teachers of both objectives
    flow        the same, of the eight flow experts
    best        as mixed, from the weights of the best expert
    average     as mixed, from the average of the flow experts
    samples     as mixed, without data: on the ensemble's own trajectories
    data        no teachers: trained on the data for as many operations as `mixed` takes with its teachers

All are painted from the same noise by one `atoll evaluate` and measured alike. `operations` are counted, matrix
products only; `share` is of the monolith's training. Ratios are of Frechet distances, over the better of the mixed
ensemble's top-1 and top-2 at the same guidance. Every command resumes, and so does this script with --work.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import mean
from typing import Any

from atoll.artifacts import Artifact, Store
from atoll.data.index import Index
from atoll.demo import demo_settings, tiny_settings
from atoll.distill.plan import DistillPlan
from atoll.ensemble.versions import open_ensemble, open_reference
from atoll.islands.order import Order
from atoll.models.accounting import flops_forward
from atoll.pipeline.settings import RunSettings, write_once
from atoll.pipeline.stages import carry_out
from atoll.planning.monolith import order_on_everything, write_alone
from atoll.router.card import read_router_card

SIZES = {"demo": (demo_settings, 1000, 50), "tiny": (tiny_settings, 40, 4)}  # settings, samples per arm, steps
FLOW = "8flow"
STUDENTS = {
    "mixed": ("mixed", []),
    "flow": ("flow", []),
    "best": ("mixed", ["--start", "best"]),
    "average": ("mixed", ["--start", "average"]),
    "samples": ("mixed", ["--from-samples"]),
}
ALONE = "data"
GUIDANCES = ("1", "2")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--size", choices=sorted(SIZES), default="demo")
    parser.add_argument("--work", type=Path, help="keep runs and students below this folder, and go on there")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        work = (arguments.work or Path(temporary)).resolve()
        seeds = [measure(work / f"seed-{seed}", seed, arguments.size) for seed in arguments.seeds]
    record = {
        "command": " ".join(["python benchmarks/distill.py", *sys.argv[1:]]),
        "machine": {"cores": os.cpu_count(), "machine": platform.machine(), "python": platform.python_version()},
        "seeds": seeds,
        "summary": summary(seeds),
    }
    arguments.out.write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(record["summary"], indent=1))


def measure(work: Path, seed: int, size: str) -> dict[str, Any]:
    """Everything of one seed."""
    settings, count, steps = SIZES[size]
    runs = {"mixed": work / "mixed", "flow": work / "flow"}
    make_run(runs["mixed"], settings(seed), compare=True)
    make_run(runs["flow"], with_mix(settings(seed), FLOW), compare=False)
    prompts = work / "prompts.txt"
    prompts.write_text("\n".join(prompts_of(runs["mixed"])) + "\n")

    students = {name: work / "students" / name for name in (*STUDENTS, ALONE)}
    for name, (run, options) in STUDENTS.items():
        more = ["--prompts", str(prompts)] if "--from-samples" in options else []
        atoll("distill", runs[run], "--out", students[name], "--seed", seed, "--device", "cpu", *options, *more)
    told = {name: json.loads((students[name] / "distillation.json").read_text()) for name in STUDENTS}
    train_alone(runs["mixed"], students[ALONE], settings(seed), told["mixed"])

    painted = ["-n", count, "--steps", steps, *(part for scale in GUIDANCES for part in ("--guidance", scale))]
    beside = [part for place in students.values() for part in ("--student", place)]
    atoll("evaluate", runs["mixed"], *painted, *beside, "--out", work / "mixed-results")
    atoll("evaluate", runs["flow"], *painted, "--out", work / "flow-results")
    evaluations = {name: json.loads((work / f"{name}-results" / "evaluation.json").read_text()) for name in runs}
    return {
        "seed": seed,
        "floors": evaluations["mixed"]["floors"],
        "operations": {name: each["operations"] for name, each in told.items()},
        "per_step": per_step(runs["mixed"], told["mixed"]),
        "arms": {name: table(evaluation) for name, evaluation in evaluations.items()},
    }


def make_run(place: Path, settings: RunSettings, *, compare: bool) -> None:
    """The demo with these settings; nothing is done twice."""
    place.mkdir(parents=True, exist_ok=True)
    run = Store.at(place)
    print(f"{place.parent.name}: the ensemble {place.name}", file=sys.stderr, flush=True)
    carry_out(run, write_once(run, settings), device="cpu", show=lambda what, done, total: None, compare=compare)


def with_mix(settings: RunSettings, mix: str) -> RunSettings:
    asked, plan = settings.asked.model_copy(update={"mix": mix}), settings.plan.model_copy(update={"mix": mix})
    return settings.model_copy(update={"asked": asked, "plan": plan})


def prompts_of(run: Path) -> list[str]:
    """Every caption of the data, once."""
    captions = Index.of(Artifact.open(run / "data", "data")).captions
    return sorted({caption for some in captions for caption in some})


def train_alone(run: Path, out: Path, settings: RunSettings, told: dict[str, Any]) -> None:
    """An expert on all of the data, without teachers, for the operations that a student takes with them."""
    plan = DistillPlan.model_validate(told["plan"])
    spent = told["operations"]
    whole = (spent["student"] + spent["teachers"]) / spent["student"]
    batch = plan.training.batch
    training = plan.training.over(round(plan.training.images * whole / batch) * batch)
    data, partition = Artifact.open(run / "data", "data"), Artifact.open(run / "partition", "partition")
    order = order_on_everything(data, partition, settings.plan, "alone", "flow")
    change = {"architecture": plan.network, "objective": plan.objective, "training": training}
    order = Order.model_validate(order.model_copy(update=change).model_dump())
    write_alone(data, partition, run / "orders-alone", order)
    atoll("train", run / "orders-alone" / "alone.json", "--out", out, "--device", "cpu", "--no-sheets")


def per_step(run: Path, told: dict[str, Any]) -> dict[str, float]:
    """Operations for one step of one image without guidance; all experts of the demo are alike."""
    place = Store.at(run)
    router = open_ensemble(place).router
    assert router is not None
    trunk = read_router_card(open_reference(place, router, "router")).architecture.trunk
    student = flops_forward(DistillPlan.model_validate(told["plan"]).network)
    return {"student": student, "top-1": student + flops_forward(trunk), "top-2": 2 * student + flops_forward(trunk)}


def table(evaluation: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Frechet distance and share recognised of every arm by name; students under the names they have here."""
    return {arm["name"]: {key: arm[key] for key in ("frechet", "recognised")} for arm in evaluation["arms"]}


def summary(seeds: list[dict[str, Any]]) -> dict[str, Any]:
    """Ratios of every seed and their mean, and what the issue asks for."""
    ratios: dict[str, dict[str, Any]] = {}
    for scale in GUIDANCES:
        for name in (*STUDENTS, ALONE, "monolith", "flow ensemble"):
            each = [distance(seed, name, scale) / ensemble(seed, "mixed", scale) for seed in seeds]
            ratios[f"{name}, guidance {scale}"] = {"mean": mean(each), "seeds": each}
    operations = [seed["operations"]["mixed"] for seed in seeds]
    return {
        "frechet over the mixed ensemble's": ratios,
        "mixed student over flow student": {
            scale: mean(distance(s, "mixed", scale) / distance(s, "flow", scale) for s in seeds) for scale in GUIDANCES
        },
        "share of the monolith's operations": mean((o["student"] + o["teachers"]) / o["monolith"] for o in operations),
        "targets": {"mixed student over the ensemble": 1.1, "share": 1 / 3, "mixed over flow": 1.0},
    }


def ensemble(seed: dict[str, Any], run: str, scale: str) -> float:
    """The better of top-1 and top-2."""
    return min(float(seed["arms"][run][f"top-{k}-g{scale}"]["frechet"]) for k in (1, 2))


def distance(seed: dict[str, Any], name: str, scale: str) -> float:
    if name == "flow ensemble":
        return ensemble(seed, "flow", scale)
    arm = f"monolith-g{scale}" if name == "monolith" else f"student-{name}-g{scale}"
    return float(seed["arms"]["mixed"][arm]["frechet"])


def atoll(*arguments: object) -> None:
    words = [str(each) for each in arguments]
    print("atoll " + " ".join(words), file=sys.stderr, flush=True)
    command = [sys.executable, "-m", "atoll", *words]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"})


if __name__ == "__main__":
    main()
