"""atoll evaluate: sample every configuration and measure them alike."""

from __future__ import annotations

import re
from dataclasses import fields
from typing import Annotated

import torch
import typer

from ..artifacts import Artifact, Store, UserError
from ..evaluation.evaluate import FEWEST, EvaluationPlan, configurations
from ..evaluation.evaluate import evaluate as run_evaluation
from ..evaluation.report import write_report
from ..executor import make_executor
from ..islands.expert import KIND as EXPERT
from ..islands.expert import read_expert_card
from ..mixture.routes import parse_route
from ..models.feature_extractors import extractor_id
from ..registry.checks import check_spaces
from ..registry.versions import Version, open_ensemble
from ..sampling import Sampling
from .options import Devices, Engine, Memory, RayAddress, Settings, Threads, Weights, with_settings
from .progress import progress
from .tables import print_evaluation, print_line


@with_settings(Sampling, *(each.name for each in fields(Sampling) if each.name not in ("route", "guidance")))
def evaluate(
    run: Annotated[str, typer.Argument(help="The run.")],
    *,
    route: Annotated[list[str], typer.Option(help="Route to compare. Repeatable.")] = ["top-1", "top-2"],
    guidance: Annotated[list[float], typer.Option(help="Guidance to compare. Repeatable.", metavar="<number>")] = [2.0],
    router: Annotated[list[str], typer.Option(help="Another router to compare, such as router-blind.")] = [],
    student: Annotated[list[str], typer.Option(help="Folder of a student to compare. Repeatable.")] = [],
    n: Annotated[int, typer.Option("-n", help="Samples per configuration.", min=FEWEST)] = 1000,
    features: Annotated[list[str], typer.Option(help="Further features: inception (FID), dinov2:PLACE.")] = [],
    lpips: Annotated[bool, typer.Option("--lpips", help="Also LPIPS between images of one prompt.")] = False,
    seed: Annotated[int, typer.Option(help="Image i uses seed + i.")] = 0,
    seeds: Annotated[int, typer.Option(help="Repeat with other noise: mean and interval over N sets.", min=1)] = 1,
    batch: Annotated[int, typer.Option(help="Images sampled at a time, and kept after a stop.", min=1)] = 500,
    settings: Settings,
    threads: Threads = None,
    device: Devices = None,
    memory: Memory = None,
    weights: Weights = None,
    npz: Annotated[bool, typer.Option("--npz", help="Also write samples/NAME.npz for ADM's evaluator.")] = False,
    engine: Engine = "local",
    ray_address: RayAddress = None,
    out: Annotated[str | None, typer.Option(help="Folder for the results (default: the run).")] = None,
) -> None:
    """Compare sampling settings on the same prompts and noise, with a real-data baseline and intervals.

    A monolith of the run is measured too, and compared with the first --route.
    Writes evaluation.json, report.html and samples.png. The same command resumes.

    \b
    Examples:
      atoll evaluate runs/demo
      atoll evaluate runs/demo --route top-1 --route full --guidance 1 --guidance 2 -n 2000
      atoll evaluate runs/demo --seeds 3 --route-every 5 --out every-fifth
      atoll evaluate runs/demo --student student
      atoll evaluate runs/photos -n 10000 --device cuda --features inception --lpips --npz
      atoll evaluate /shared/photos -n 50000 --engine ray --ray-address auto --device cuda
    """
    sampling = settings.over(Sampling())
    settings.show(sampling, "sampling")
    for name in route:
        parse_route(name)
    for name in features:
        extractor_id(name)  # refuse what is not there before anything is sampled
    place, results = Store.at(run), Store.at(out or run)
    if not results.is_local:
        raise UserError(f"--out: results of {run} need a local folder; give one with --out")
    version = open_ensemble(place)
    students = students_of(student, version)
    plan = EvaluationPlan(
        configurations=configurations(
            route,
            guidance,
            routers=(None, *router),
            monolith=version.monolith is not None,
            students=students,
            sampling=sampling,
        ),
        count=n,
        seed=seed,
        seeds=seeds,
        batch=batch,
        threads=threads or (1 if engine == "ray" else torch.get_num_threads()),  # a worker of Ray has one core
        features=tuple(dict.fromkeys(features)),
        lpips=lpips,
    )
    with progress() as display:
        display("measuring real images", 0, None)
        result = run_evaluation(
            place,
            plan,
            results,
            device=device,
            memory=memory,
            weights=weights,
            npz=npz,
            executor=make_executor(engine, 1, ray_address),
            students=students,
            progress=lambda name, done, total: display(f"sampling {name}", done, total),
        )
    write_report(place, result, results)
    print_evaluation(result)
    print_line(f"{results}/report.html")


def students_of(folders: list[str], version: Version) -> dict[str, Store]:
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
            raise UserError(f"--student {folder}: another one has that name; rename one of the folders")
        students[name] = artifact.store
    return students
