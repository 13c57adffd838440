"""atoll evaluate: sample every way to run the model, and measure them alike."""

from __future__ import annotations

import re
from typing import Annotated

import torch
import typer

from ..artifacts import Artifact, Store, UserError, sweep
from ..ensemble.checks import check_spaces
from ..ensemble.routes import parse_route
from ..ensemble.versions import Version, clean_run, open_ensemble, open_reference
from ..evaluation.evaluate import EvaluationPlan, arms_for, monolith_arms, student_arms
from ..evaluation.evaluate import evaluate as run_evaluation
from ..evaluation.report import write_report
from ..islands.expert import KIND as EXPERT
from ..islands.expert import read_expert_card
from ..sampling import Sampling
from .bars import bars, console
from .sampling_options import Device, Memory, Threads, Weights, sampling_options
from .tables import print_evaluation


@sampling_options(own=("route", "guidance"))
def evaluate(
    run: Annotated[str, typer.Argument(help="The run")],
    *,
    route: Annotated[list[str], typer.Option(help="Routes to compare; repeat it")] = ["top-1", "top-2"],  # noqa: B006
    guidance: Annotated[list[float], typer.Option(help="Guidance scales to compare; repeat it")] = [2.0],  # noqa: B006
    router: Annotated[list[str], typer.Option(help="Other router folders to compare, such as router-blind")] = [],  # noqa: B006
    student: Annotated[list[str], typer.Option(help="Students to compare, folders of atoll distill; repeat it")] = [],  # noqa: B006
    n: Annotated[int, typer.Option("-n", help="Samples per arm", min=2)] = 1000,
    seed: Annotated[int, typer.Option(help="Image i uses seed + i")] = 0,
    sampling: Sampling,
    threads: Threads = None,
    device: Device = None,
    memory: Memory = None,
    weights: Weights = None,
    npz: Annotated[
        bool, typer.Option("--npz", help="Also write samples/ARM.npz for ADM's and other evaluators")
    ] = False,
    out: Annotated[str | None, typer.Option(help="Folder for the results; default: the run")] = None,
) -> None:
    """Measure: share recognised, Frechet distance with its interval, kernel distance, precision, recall, diversity
    within prompts, distance to the nearest training sample, beside real-data floors.

    A model that names a monolith has it measured too. Writes evaluation.json, report.html and samples.png.

    Examples:

      atoll evaluate runs/demo

      atoll evaluate runs/demo --route top-1 --route full --guidance 1 --guidance 2 -n 2000

      atoll evaluate runs/demo --route-every 5 --out every-fifth

      atoll evaluate runs/demo --student student

      atoll evaluate runs/photos -n 10000 --device cuda --npz

      atoll evaluate runs/photos --memory 12GB --weights int8 --out in-eight-bits
    """
    for name in route:
        parse_route(name)
    place = clean_run(run)
    results = Store.at(out or run)
    if not results.is_local:
        raise UserError(f"--out: results of {run} need a local folder; give one with --out")
    sweep(results.path, deep=False)
    sweep(results.path / "samples")
    version = open_ensemble(place)
    data = open_reference(place, version.data, "data")
    arms = arms_for(route, guidance, sampling=sampling)
    for other in router:
        arms += arms_for(route, guidance, router=other, sampling=sampling)
    if version.monolith is not None:
        arms += monolith_arms(guidance, sampling=sampling)
    students = named_students(student, version)
    arms += student_arms(students, guidance, sampling=sampling)
    scale = 16.0 if data.config["source"]["kind"] == "digits" else 1.0
    plan = EvaluationPlan(
        arms=arms, count=n, seed=seed, threads=threads or torch.get_num_threads(), feature_scale=scale
    )
    with bars() as bar:
        bar("measuring real images", 0, None)
        result = run_evaluation(
            place,
            plan,
            results,
            device=device,
            memory=memory,
            weights=weights,
            npz=npz,
            students=students,
            progress=lambda arm, done, total: bar(f"painting {arm}", done, total),
        )
    write_report(place, result, results)
    print_evaluation(result)
    console.print(f"[bold]{results}/report.html[/bold]", soft_wrap=True)


def named_students(folders: list[str], version: Version) -> dict[str, Store]:
    """Experts of all clusters that are no part of the run, by the names of their folders."""
    students: dict[str, Store] = {}
    for folder in folders:
        artifact = Artifact.open(folder, EXPERT)
        card = read_expert_card(artifact)
        check_spaces(version, card, f"--student {folder}")
        if card.cluster is not None:
            raise UserError(f"--student {folder}: is an expert of one cluster; give a folder of `atoll distill`")
        name = re.sub(r"[^A-Za-z0-9._-]", "-", artifact.store.name)
        if name in students:
            raise UserError(f"--student {folder}: another one has that name; call the folders differently")
        students[name] = artifact.store
    return students
