"""What the cheaper ways to sample cost in quality: the router asked rarely, an expert fixed, bfloat16.

    python benchmarks/sampling_choices.py RUN --out benchmarks/results/sampling-choices.csv [--seeds 0 1000] [-n 1000]

RUN is a finished demo (`atoll demo`). Every arm paints the same prompts from the same noise, and is measured as
`atoll evaluate` measures: Frechet distance and share recognised. Beside them stands how many images differ visibly, in
some pixel by a tenth of the range, from those of the same route (`fixed`: of top-1) in float32 with the router asked at
every step.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch import Tensor

from atoll.artifacts import Artifact, Store
from atoll.evaluation.evaluate import Configuration, EvaluationPlan, evaluate
from atoll.evaluation.samples import read_samples
from atoll.sampling import Sampling
from records import scores_of, write_record

VISIBLE = 25  # of 255 grey values


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1000])
    parser.add_argument("--every", type=int, nargs="+", default=[1, 2, 5, 10, 50])
    parser.add_argument("--guidance", type=float, nargs="+", default=[2.0, 1.0])
    parser.add_argument("-n", type=int, default=1000, help="samples per arm")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--work", type=Path, help="keep the samples below this folder")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        work = arguments.work or Path(temporary)
        arms = arms_of(arguments.every, arguments.guidance, arguments.steps)
        runs = [measured(arguments.run, work / f"seed-{seed}", arms, seed, arguments.n) for seed in arguments.seeds]
    record = {
        "command": " ".join(["python benchmarks/sampling_choices.py", *sys.argv[1:]]),
        "machine": {"cores": os.cpu_count(), "machine": platform.machine(), "python": platform.python_version()},
        "sampling": {"steps": arguments.steps, "solver": Sampling().solver, "count": arguments.n},
        "real": runs[0]["real"],
        "summary": [summed_up(arm, [run["arms"][arm.name] for run in runs]) for arm in arms],
        "runs": {seed: run["arms"] for seed, run in zip(arguments.seeds, runs, strict=True)},
    }
    write_record(arguments.out, record)
    for row in record["summary"]:
        print(json.dumps(row))


def arms_of(every: list[int], guidances: list[float], steps: int) -> list[Configuration]:
    """Two routes with the router asked more and more rarely, and in bfloat16; and `fixed`."""
    ways: list[dict[str, Any]] = [{"route": "fixed"}]
    for route in ("top-1", "top-2"):
        ways += [{"route": route, "route_every": n} for n in every] + [{"route": route, "precision": "bfloat16"}]
    samplings = [
        Sampling(**{"steps": steps, "guidance": guidance, "precision": "float32", **way})
        for guidance in guidances
        for way in ways
    ]
    return [Configuration(name=name_of(sampling), sampling=sampling) for sampling in samplings]


def name_of(sampling: Sampling) -> str:
    half = "-bfloat16" if sampling.precision == "bfloat16" else ""
    return f"{sampling.route}-every-{sampling.route_every}-g{sampling.guidance:g}{half}"


def measured(run: Path, work: Path, arms: list[Configuration], seed: int, count: int) -> dict[str, Any]:
    plan = EvaluationPlan(configurations=tuple(arms), count=count, seed=seed)

    def show(name: str, done: int, total: int) -> None:
        if done == total:
            print(f"seed {seed}: {name}", file=sys.stderr, flush=True)

    result = evaluate(Store.at(run), plan, Store.at(work), device="cpu", progress=show)
    rows = result["configurations"]
    images = {row["name"]: read_samples(Artifact.open(work / "samples" / row["folders"][0]))[0] for row in rows}
    found = {}
    for row, arm in zip(scores_of(result, "fd", "class_accuracy"), arms, strict=True):
        route = "top-1" if arm.sampling.route == "fixed" else arm.sampling.route
        plain = name_of(replace(arm.sampling, route=route, route_every=1, precision="float32"))
        found[arm.name] = {
            **row,
            "visibly_different": different(images[arm.name], images[plain]),
        }
    return {"real": result["real"], "arms": found}


def different(images: Tensor, others: Tensor) -> float:
    """Share of images [N, C, H, W] of which some pixel differs visibly."""
    return ((images.int() - others.int()).abs().flatten(1).amax(1) > VISIBLE).float().mean().item()


def summed_up(arm: Configuration, rows: list[dict[str, float]]) -> dict[str, Any]:
    """One arm over all seeds: means, and every Frechet distance: a difference means something beyond their spread."""
    sampling = arm.sampling
    asked = sampling.steps if sampling.route == "fixed" else sampling.route_every
    return {
        "route": sampling.route,
        "route_every": sampling.route_every,
        "guidance": sampling.guidance,
        "precision": sampling.precision,
        "router_calls_per_step": 1 / asked,
        "fd": round(mean(row["fd"] for row in rows), 4),
        "fd_by_seed": [round(row["fd"], 4) for row in rows],
        "class_accuracy": round(mean(row["class_accuracy"] for row in rows), 4),
        "visibly_different": round(mean(row["visibly_different"] for row in rows), 4),
    }


if __name__ == "__main__":
    main()
