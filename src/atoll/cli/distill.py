"""atoll distill: eight experts in, one dense network out."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..artifacts import UserError, find
from ..distill.plan import DistillPlan, student_plan
from ..distill.stage import Teachers
from ..distill.stage import distill as run_distillation
from ..ensemble.routes import parse_route
from ..ensemble.versions import clean_run
from ..training.resources import Resources, parse_memory
from ..training.team import leads_its_team
from .progress import console, progress
from .settings import kept_shares, parse_overrides, read_settings, settings_table
from .training_options import CheckpointSeconds, Device, Memory, SettingsOnly

HOW = "execution."  # settings of how it is computed, which a plan has none of
STARTS = ("random", "best", "average")


def distill(
    run: Annotated[str, typer.Argument(help="The run whose experts are the teachers")],
    out: Annotated[str, typer.Option(help="Folder for the student; work in progress lies in its state/")],
    objective: Annotated[
        str | None,
        typer.Option(help="What the student learns by: flow, ddpm or v, whatever its teachers did; or --set"),
    ] = None,
    start: Annotated[
        str | None,
        typer.Option(
            help="Begin at weights: best (an expert's), average, random; default: best, or average without data"
        ),
    ] = None,
    truth: Annotated[
        float | None, typer.Option(help="Share of the sample's own target beside every expert's answer; default: 0")
    ] = None,
    from_samples: Annotated[
        bool, typer.Option("--from-samples", help="Learn on what the ensemble paints; no data is needed")
    ] = False,
    prompts: Annotated[Path | None, typer.Option(help="With --from-samples: a file with a prompt in each line")] = None,
    route: Annotated[
        str | None, typer.Option(help="With --from-samples: which experts answer; default: the model's own")
    ] = None,
    overrides: Annotated[
        list[str],
        typer.Option("--set", help="training.images=200000, network.depth=4; how: execution.precision=float32"),
    ] = [],  # noqa: B006
    seed: Annotated[int, typer.Option(help="Seed of weights, noise and order")] = 0,
    device: Device = None,
    memory: Memory = None,
    checkpoint_seconds: CheckpointSeconds = None,
    tensorboard: Annotated[str | None, typer.Option(help="Write losses and rate for TensorBoard here")] = None,
    settings_only: SettingsOnly = False,
) -> None:
    """Train one dense network to answer as the experts of a run's model do. Run it again to go on after a stop.

    For every training sample it learns the answer of the expert of that
    sample's own cluster, whatever that one was trained with; no router is
    asked. By default it has the largest expert's architecture, batch and
    learning rate, begins at the weights of the expert with the lowest error on
    all validation data, and sees a quarter of what all experts saw, with the
    teachers' answers a third of a monolith's operations. Twice the experts'
    share of it is without a prompt, which guidance needs. With --truth 0.5
    half of what it learns is the data's own: better on photographs, and on
    digits without guidance. With an expert that predicts noise alone, whose
    errors grow towards noise, the data answers in any case: by the mean of all
    samples that may lie behind a state; --set trust=whole takes every answer
    as it is.

    The result is an expert without a cluster: sample, evaluate and export take
    its folder as they take a run. See docs/distill.md.

    Examples:

      atoll distill runs/demo --out student

      atoll distill runs/demo --out student --truth 0.5

      atoll distill runs/demo --out student --start random --set training.images=96000

      atoll distill runs/demo --out student --objective ddpm --set network.depth=4

      atoll distill runs/demo --out student --set objective.schedule.name=edm --set objective.kind=x0

      atoll distill runs/demo --out student --from-samples --prompts prompts.txt

      atoll sample student --prompt "a handwritten three"
    """
    folder = Path(out)
    if "://" in out or folder.is_file():
        raise UserError(f"--out {out}: give a local folder")
    if start is not None and start not in STARTS:
        raise UserError(f"--start {start}: use one of {', '.join(STARTS)}")
    if truth is not None and not 0 <= truth <= 1:
        raise UserError(f"--truth {truth:g}: is a share; give a number from 0 (the experts' answers) to 1 (the data)")
    place = clean_run(run)
    flags = {"start": start, "truth": truth, "states": "samples" if from_samples else "data"} | asked_of_samples(
        from_samples, prompts, route
    )
    how = [text.removeprefix(HOW) for text in overrides if text.startswith(HOW)]
    what = [text for text in overrides if not text.startswith(HOW)]
    plan = told_student(student_plan(Teachers.of(place).orders, objective=objective, seed=seed), flags, what)
    if settings_only:
        console.print(settings_table(plan, f"a student of {place.name}"))
        return
    there, leads = find(folder) is not None, leads_its_team()  # of several processes that train together one talks
    with progress(quiet=there or not leads, tensorboard=tensorboard if leads else None) as display:
        artifact = run_distillation(
            place,
            folder,
            plan,
            resources=Resources(device, None if memory is None else parse_memory(memory), parse_overrides(how)),
            checkpoint_seconds=checkpoint_seconds,
            watch=display.training(),
        )
    if leads and artifact is not None:
        line = f"student {artifact.digest[:12]} {'already there' if there else 'in'} [bold]{out}[/bold]"
        console.print(line, soft_wrap=True)


def asked_of_samples(from_samples: bool, prompts: Path | None, route: str | None) -> dict[str, object]:
    """What is said of the ensemble's own samples; refused where no samples are asked for."""
    if not from_samples:
        for option, value in (("--prompts", prompts), ("--route", route)):
            if value is not None:
                raise UserError(f"{option}: has a meaning with --from-samples only; add that, or leave it out")
        return {}
    if route is not None:
        parse_route(route)
    return {"route": route, "prompts": None if prompts is None else read_prompts(prompts)}


def read_prompts(path: Path) -> tuple[str, ...]:
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    except FileNotFoundError as error:
        raise UserError(f"--prompts {path}: no such file") from error
    except UnicodeDecodeError as error:
        raise UserError(f"--prompts {path}: not a text file in UTF-8") from error
    prompts = tuple(line for line in lines if line)
    if not prompts:
        raise UserError(f"--prompts {path}: holds no prompt; write one in each line")
    return prompts


def told_student(plan: DistillPlan, flags: dict[str, object], overrides: list[str]) -> DistillPlan:
    """A plan with what the user says; warm-up and average keep their share of another budget."""
    told = read_settings(plan, flags=flags, overrides=overrides)
    return told.model_copy(update={"training": kept_shares(plan.training, told.training, overrides)})
