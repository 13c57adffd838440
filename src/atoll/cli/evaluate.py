"""atoll evaluate: sample every way to run the model, and measure them alike."""

from __future__ import annotations

import re
from typing import Annotated

import torch
import typer

from ..artifacts import Artifact, Store, UserError, remove_stale
from ..ensemble.checks import check_spaces
from ..ensemble.routes import parse_route
from ..ensemble.versions import Version, clean_run, open_ensemble, open_reference
from ..evaluation.evaluate import EvaluationPlan, arms_for, monolith_arms, student_arms
from ..evaluation.evaluate import evaluate as run_evaluation
from ..evaluation.report import write_report
from ..executor import make_executor
from ..islands.expert import KIND as EXPERT
from ..islands.expert import read_expert_card
from ..models.feature_extractors import extractor_id
from ..sampling import Sampling
from .progress import console, progress
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
    features: Annotated[
        list[str],
        typer.Option(help="Measure by these too: inception (the standard FID), dinov2, dinov2:PLACE; repeat it"),
    ] = [],  # noqa: B006
    lpips: Annotated[
        bool, typer.Option("--lpips", help="Also LPIPS between images of one prompt; its weights are fetched once")
    ] = False,
    seed: Annotated[int, typer.Option(help="Image i uses seed + i")] = 0,
    batch: Annotated[int, typer.Option(help="Images painted at a time, and kept if it is stopped", min=1)] = 500,
    sampling: Sampling,
    threads: Threads = None,
    device: Device = None,
    memory: Memory = None,
    weights: Weights = None,
    npz: Annotated[
        bool, typer.Option("--npz", help="Also write samples/ARM.npz for ADM's and other evaluators")
    ] = False,
    engine: Annotated[str, typer.Option(help="Who paints: local, or ray: machines that share the folders")] = "local",
    ray_address: Annotated[str | None, typer.Option(help="A running Ray cluster (default: this machine)")] = None,
    out: Annotated[str | None, typer.Option(help="Folder for the results; default: the run")] = None,
) -> None:
    """Measure: share recognised, Frechet distance, kernel distance, precision, recall, diversity within prompts,
    distance to the nearest training sample, with intervals, beside real-data floors; all also cluster by cluster.

    A model that names a monolith has it measured too. Writes evaluation.json, report.html and samples.png. Stopped or
    killed, the same command goes on with the first batch that is not painted.

    Examples:

      atoll evaluate runs/demo

      atoll evaluate runs/demo --route top-1 --route full --guidance 1 --guidance 2 -n 2000

      atoll evaluate runs/demo --route-every 5 --out every-fifth

      atoll evaluate runs/demo --student student

      atoll evaluate runs/photos -n 10000 --device cuda --features inception --lpips --npz

      atoll evaluate /shared/photos -n 50000 --engine ray --ray-address auto --device cuda

      atoll evaluate runs/photos --memory 12GB --weights int8 --out in-eight-bits
    """
    for name in route:
        parse_route(name)
    place = clean_run(run)
    results = Store.at(out or run)
    if not results.is_local:
        raise UserError(f"--out: results of {run} need a local folder; give one with --out")
    remove_stale(results.path, deep=False)
    remove_stale(results.path / "samples")
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
    # a worker of Ray has a core of its own
    threads = threads or (1 if engine == "ray" else torch.get_num_threads())
    for name in features:
        extractor_id(name)  # one that cannot be had is better known before anything is painted
    plan = EvaluationPlan(
        arms=arms,
        count=n,
        seed=seed,
        batch=batch,
        threads=threads,
        feature_scale=scale,
        features=tuple(dict.fromkeys(features)),
        lpips=lpips,
    )
    executor = make_executor(engine, 1, ray_address)
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
            executor=executor,
            students=students,
            progress=lambda arm, done, total: display(f"painting {arm}", done, total),
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
