"""atoll run: the whole pipeline on one machine."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from typing import Annotated

import typer
from rich.table import Table

from ..artifacts import Artifact, Store, UserError, find, sanitize
from ..data.prepare import check_apart, check_device
from ..data.sources import Source, SourceConfig, is_built_in, open_source
from ..ensemble.status import holds_run, shell
from ..ensemble.versions import clean_run, open_ensemble
from ..partition.config import LARGEST_SEED
from ..pipeline.settings import NAME, Asked, RunSettings, read_run, write_once
from ..pipeline.sizing import FEW_IMAGES, forecast, size_run
from ..pipeline.stages import STAGES, carry_out, was_compared
from ..planning.recipes import RECIPES
from ..training.execution import named_or_best
from ..training.machines import Machine, this_machine
from .options import Plugins
from .prepare import summary
from .progress import clock, console, print_line, progress
from .router import accuracy_line
from .tables import plain, print_evaluation

LARGEST_SIDE = 4096  # pixels


def run(
    source: Annotated[
        str | None,
        typer.Argument(help="A folder of images, tars, parquet, a URL; none: go on"),
    ] = None,
    out: Annotated[str, typer.Option(help="Folder of the run")] = "",
    clusters: Annotated[
        int | None,
        typer.Option(
            "--clusters",
            "-k",
            help="How many experts (default: as --objectives names, or 8, fewer for few images or little time)",
            min=2,
        ),
    ] = None,
    hours: Annotated[float | None, typer.Option(help="How long it may take here (default: 1)", min=0)] = None,
    size: Annotated[
        int | None, typer.Option(help="Side of the square images (default: 64)", min=1, max=LARGEST_SIDE)
    ] = None,
    objectives: Annotated[str | None, typer.Option(help="Such as 2ddpm:6flow (default: all flow)")] = None,
    recipe: Annotated[
        str | None, typer.Option(help=f"{', '.join(RECIPES)} (default: what suits data, machine and hours)")
    ] = None,
    format_: Annotated[str | None, typer.Option("--format", help="Of the source; as in `atoll prepare`")] = None,
    plugin: Plugins = [],
    compare: Annotated[bool, typer.Option(help="Train a monolith on all of the data, too, and compare")] = False,
    until: Annotated[str, typer.Option(help=f"Stop after a stage: {', '.join(STAGES)}")] = STAGES[-1],
    seed: Annotated[int | None, typer.Option(help="Seed of everything (default: 0)", min=0)] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda or mps; default: cuda if there is one")] = None,
) -> None:
    """From a folder of pictures to a model and its report, on this machine, with one command.

    It prints what it will do and how long each stage takes, writes that down
    in RUN/run.toml, and does it: prepare, partition, plan, every island in a
    process of its own, admit, router, evaluate. Stopped anywhere, the same
    command goes on. Folders that hold the images are taken for their classes.

    With contributors, stop after the orders are written: --until plan.

    Examples:

      atoll run ~/photos --out runs/photos

      atoll run ~/photos --out runs/photos -k 4 --hours 0.5 --size 32

      atoll run ~/photos --out runs/photos --objectives 2ddpm:6flow --until plan
    """
    if not out:
        raise UserError("--out: missing; say where the run goes, for example --out runs/photos")
    if until not in STAGES:
        raise UserError(f"--until {until}: use one of {', '.join(STAGES)}")
    check_seed(seed or 0)
    place = place_for(out, source)
    if source is not None and "://" not in source and not is_built_in(source):
        source = os.path.abspath(source)  # to go on from any folder
    is_new = not place.exists()
    on = named_or_best(device)
    check_device(on)
    machine = this_machine(on)
    told = {"hours": hours, "clusters": clusters, "size": size, "objectives": objectives, "recipe": recipe}
    told |= {"seed": seed, "format": format_}
    asked = Asked(**{name: value for name, value in told.items() if value is not None})
    begun = read_run(place)
    wishes = [] if begun is None else others(begun, told)
    if begun is None or (wishes and source is not None and find(place.child("data")) is None):
        if source is None:
            raise UserError(f"SOURCE: missing, and {out} holds no {NAME} to go on with; name a folder of images")
        origin = open_source(source, SourceConfig(format=format_))
        settings = size_run(origin, asked, machine, compare=compare)
        origin = origin.reconfigured(settings.prepare.source)
        if wishes:  # nothing is made yet, so that another wish is no contradiction
            (place.path / NAME).unlink()
        settings = write_once(place, settings)
    elif wishes:
        name, value, before = wishes[0]
        raise UserError(f"--{name} {value}: {place}/{NAME} says {before}; leave it out, or choose another --out")
    else:
        settings = begun if source is None else begun.model_copy(update={"source": source})
        origin = open_source(settings.source, settings.prepare.source)
    try:
        carry_out_and_tell(place, settings, origin, machine, compare=compare, until=until, device=on)
    except UserError:
        if place.children() == [NAME]:  # nothing came of it: the next try begins anew
            (place.path / NAME).unlink()
            if is_new:
                place.path.rmdir()
        raise


def check_seed(seed: int) -> None:
    if seed > LARGEST_SEED:
        raise UserError(f"--seed {seed}: use a number from 0 to {LARGEST_SEED}")


def place_for(out: str, source: str | None = None) -> Store:
    """The folder of a run on this machine, outside its source: a new one, an empty one, or a run already."""
    place = clean_run(out)
    if not place.is_local:
        raise UserError(f"--out {out}: the islands are trained on this machine; give a local folder")
    if place.path.is_file():
        raise UserError(f"--out {out}: is a file; name a folder for the run")
    if source is not None:
        check_apart(source, place)
    there = [name for name in place.children() if not name.startswith(".")]
    if there and not holds_run(place):
        raise UserError(f"--out {out}: is no run, it holds {sanitize(there[0])}; choose a new or an empty folder")
    return place


def others(begun: RunSettings, told: Mapping[str, object]) -> list[tuple[str, object, object]]:
    """What is asked for now and was not before, with what was; to go on with the old would ignore it in silence."""
    before = {name: getattr(begun.asked, name) for name in told}
    return [
        (name, value, "the default" if before[name] is None else before[name])
        for name, value in told.items()
        if value is not None and value != before[name]
    ]


def carry_out_and_tell(
    run: Store,
    settings: RunSettings,
    origin: Source,
    machine: Machine,
    *,
    device: str,
    compare: bool = False,
    until: str = STAGES[-1],
    prompt: str | None = None,
) -> None:
    """Print what will be done and how long it takes on this machine, do it, and print what came of it."""
    began = time.monotonic()
    tell_plan(run, settings, origin, machine, compare or was_compared(run), until)
    with progress() as display:
        evaluation = carry_out(
            run, settings, origin, device=device, show=display, compare=compare, until=until, prepared=tell_data
        )
    if evaluation is None:
        tell_next(run, until)
        return
    print_evaluation(evaluation)
    if empty := open_ensemble(run).empty_clusters():
        without = ", ".join(map(str, empty))
        print_line(
            f"without the experts of clusters {without}, which were refused; reasons: `atoll status {shell(run)}`"
        )
    if (accuracy := accuracy_line(Artifact.open(run.child("router"), "router"), blind=False)) is not None:
        print_line(f"the router {accuracy}")
    console.print(f"\neverything is there, after {time.monotonic() - began:.0f} s:")
    prompt = prompt or evaluation_prompt(run)
    for name, what in (
        ("report.html", "who painted what, and how well"),
        ("samples.png", "a picture of it"),
        ("evaluation.json", "the numbers"),
        (NAME, "what was decided, to do it again"),
        ("ensemble", f'the model, version by version: `atoll sample {shell(run)} --prompt "{plain(prompt)}"`'),
    ):
        console.print(f"  [bold]{run.path / name}[/bold]  {what}", soft_wrap=True)


def tell_data(data: Artifact) -> None:
    for line in summary(data):
        print_line(line)


def tell_plan(run: Store, settings: RunSettings, origin: Source, machine: Machine, compare: bool, until: str) -> None:
    stages = forecast(settings, origin, machine, compare=compare)
    stages = [stage for stage in stages if STAGES.index(stage.name) <= STAGES.index(until)]
    table = Table(header_style="bold", box=None, padding=(0, 2, 0, 0))
    for column in ("stage", "what"):
        table.add_column(column)
    table.add_column("about", justify="right")
    for stage in stages:
        table.add_row(stage.name, plain(stage.what), clock(stage.seconds))
    table.add_row("", "all of it", clock(sum(stage.seconds for stage in stages)), style="bold")
    console.print(table)
    console.print(f"[dim]as {run.path / NAME} says; stopped anywhere, the same command goes on[/dim]", soft_wrap=True)
    if settings.plan.training.images < FEW_IMAGES and STAGES.index(until) >= STAGES.index("train"):
        print_line("so few images teach an expert little and it may be refused: give more --hours or a smaller -k")


def tell_next(run: Store, until: str) -> None:
    console.print(f"done up to {until}, in [bold]{run.path}[/bold]", soft_wrap=True)
    if until == "plan":
        print_line("send each contributor an order and its shards: orders/01.json and partition/clusters/01/")
        console.print(f"when one comes back: [bold]atoll admit FOLDER --out {shell(run)}[/bold]", soft_wrap=True)
    console.print("or train the rest here: the same command without --until")


def evaluation_prompt(run: Store) -> str:
    """A prompt of the data, to begin with."""
    samples = next(run.child("samples").path.glob("*/samples.json"), None)
    prompts = [""] if samples is None else json.loads(samples.read_bytes())["prompts"]
    return str(prompts[0])
