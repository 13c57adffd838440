"""atoll run: the whole pipeline on one machine."""

from __future__ import annotations

import json
import os
import time
from typing import Annotated

import typer

from ..artifacts import Artifact, Store, UserError, find
from ..data.prepare import check_apart, check_device
from ..data.sources import Source, SourceConfig, is_built_in, open_source
from ..pipeline.settings import NAME, Asked, RunSettings, read_run, write_once
from ..pipeline.sizing import FEW_IMAGES, forecast, measure_pace, size_run
from ..pipeline.stages import STAGES, run_pipeline
from ..registry.status import goes_on, holds_run, shell
from ..registry.versions import open_ensemble
from ..training.compute import best_device
from ..training.memory import this_machine
from .options import Device, Plugins, Settings, with_settings
from .prepare import print_summary
from .progress import clock, progress
from .router import print_accuracy
from .tables import print_evaluation, print_line, print_table


@with_settings(Asked, "clusters -k", "hours", "size", "objectives", "recipe", "format", "seed")
def run(
    source: Annotated[str | None, typer.Argument(help="Folder of images, tars, parquet, a URL; none: resume.")] = None,
    *,
    out: Annotated[str, typer.Option(help="Folder of the run.")] = "",
    settings: Settings,
    plugin: Plugins = [],
    compare: Annotated[bool, typer.Option("--compare", help="Also train one network on all data to compare.")] = False,
    until: Annotated[str, typer.Option(help=f"Stop after one of {', '.join(STAGES)}.")] = STAGES[-1],
    device: Device = None,
) -> None:
    """Turn a folder of images into a model and its report, on this machine.

    Prints what will be done and how long it takes, and records it in RUN/run.toml. Folders become classes.
    The same command resumes. With contributors, stop after the orders are written: --until plan.

    \b
    Examples:
      atoll run ~/photos --out runs/photos
      atoll run ~/photos --out runs/photos -k 4 --hours 0.5 --size 32
      atoll run ~/photos --out runs/photos --objectives 2ddpm:6flow --until plan
    """
    if not out:
        raise UserError("--out: missing; name a folder for the run, for example --out runs/photos")
    if until not in STAGES:
        raise UserError(f"--until {until}: use one of {', '.join(STAGES)}")
    asked = settings.over(Asked())
    settings.show(asked, "run")
    place, on = place_for(out, source), best_device(device)
    if source is not None and "://" not in source and not is_built_in(source):
        source = os.path.abspath(source)  # to resume from any folder
    is_new, begun = not place.exists(), read_run(place)
    check_device(on)
    # a run that nothing is made of yet may be begun again with other settings
    changed = [] if begun is None else [n for n in settings.names if getattr(asked, n) != getattr(begun.asked, n)]
    if begun is None or (changed and source is not None and find(place.child("data")) is None):
        if source is None:
            raise UserError(f"SOURCE: missing, and {out} holds no {NAME} to resume; name a folder of images")
        origin = open_source(source, SourceConfig(format=asked.format, labels="auto"))
        config = size_run(origin, asked, this_machine(on), compare=compare)
        (place.path / NAME).unlink(missing_ok=True)
    elif changed:
        name, before = changed[0], getattr(begun.asked, changed[0])
        given = f"{settings.flags.get(name, f'--set {name}')} {getattr(asked, name)}"
        was = "the default" if before is None else before
        raise UserError(f"{given}: {place}/{NAME} has {was}; leave it out, or choose another --out")
    else:
        config = begun.model_copy(update={"compare": compare or begun.compare})
    config = write_once(place, config)
    origin = open_source(source or config.source, config.prepare.source)
    try:
        run_and_print(place, config, origin, device=on, until=until)
    except UserError:
        if place.children() == [NAME]:  # nothing was made: the next try begins anew
            (place.path / NAME).unlink()
            if is_new:
                place.path.rmdir()
        raise


def place_for(out: str, source: str | None = None) -> Store:
    """The folder of a run on this machine, outside its source: a new one, an empty one, or a run already."""
    place = Store.at(out)
    if not place.is_local:
        raise UserError(f"--out {out}: experts are trained on this machine; give a local folder")
    if place.path.is_file():
        raise UserError(f"--out {out}: is a file; name a folder for the run")
    if source is not None:
        check_apart(source, place)
    there = [name for name in place.children() if not name.startswith(".")]
    if there and not holds_run(place):
        raise UserError(f"--out {out}: is no run, it holds {there[0]}; choose a new or an empty folder")
    return place


def run_and_print(run: Store, config: RunSettings, origin: Source, *, device: str, until: str = STAGES[-1]) -> None:
    """Print what will be done and how long it takes on this machine, do it, and print where the results are."""
    began = time.monotonic()
    print_forecast(run, config, origin, device, until)
    with progress() as display:
        evaluation = run_pipeline(
            run, config, origin, device=device, progress=display, until=until, prepared=print_summary
        )
    if evaluation is None:
        print_line(f"done up to {until}, in {run.path}")
        if until == "plan":
            print_line("send each contributor an order and its shards: orders/01.json and partition/clusters/01/")
            print_line(f"when one comes back: atoll admit FOLDER --out {shell(run)}")
            print_line("or train the rest here: the same command without --until")
        return
    print_evaluation(evaluation)
    if empty := open_ensemble(run).empty_clusters():
        clusters = ", ".join(map(str, empty))
        print_line(f"without the experts of clusters {clusters}, which were refused: `atoll status {shell(run)}`")
    print_accuracy(Artifact.open(run.child("router"), "router"))
    samples = next(run.child("samples").path.glob("*/samples.json"), None)
    prompts = [""] if samples is None else json.loads(samples.read_bytes())["prompts"]
    took = clock(time.monotonic() - began)
    print_line(f"everything is there, after {took}; look at {run.path / 'report.html'}, then:")
    print_line(f'atoll sample {shell(run)} --prompt "{prompts[0]}"')


def print_forecast(run: Store, config: RunSettings, origin: Source, device: str, until: str) -> None:
    """Every stage and its time; nothing for a run that is complete."""
    if not goes_on(run):
        return
    machine = this_machine(device)
    stages = forecast(config, origin, machine, measure_pace(config, origin, machine))
    stages = stages[: STAGES.index(until) + 1]
    rows = [(stage.name, stage.what, clock(stage.seconds)) for stage in stages]
    print_table("stage what >about", [*rows, ("", "all of it", clock(sum(stage.seconds for stage in stages)))])
    print_line(f"from {run.path / NAME}; the same command resumes")
    if config.plan.training.images < FEW_IMAGES and STAGES.index(until) >= STAGES.index("train"):
        print_line("so few images teach an expert little and it may be refused: give more --hours or a smaller -k")
