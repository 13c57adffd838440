"""atoll router: train what fuses the experts."""

from __future__ import annotations

import json
from statistics import mean
from typing import Annotated

import typer

from ..artifacts import Artifact, Store, UserError, find
from ..ensemble.changes import register_router
from ..ensemble.versions import open_ensemble, open_reference
from ..router.recipes import router_plan
from ..router.train import train_router
from ..training.resources import Resources, parse_memory
from .bars import console
from .settings import parse_overrides, read_settings
from .watching import say, watching

HOW = "execution."  # settings of how it is computed, which a plan has none of


def router(
    run: Annotated[str, typer.Argument(help="The run; the data and partition of its model are all that is read")],
    out: Annotated[str | None, typer.Option(help="Folder for the router; default: RUN/router")] = None,
    blind: Annotated[bool, typer.Option(help="Let it see the noisy latent and the time only, not the prompt")] = False,
    seed: Annotated[int, typer.Option(help="Seed of weights, noise and order")] = 0,
    overrides: Annotated[
        list[str], typer.Option("--set", help="training.images=200000; how to compute: execution.precision=float32")
    ] = [],  # noqa: B006
    device: Annotated[str | None, typer.Option(help="cpu, cuda, mps; default: cuda if there is one")] = None,
    memory: Annotated[
        str | None, typer.Option(help="Stay within this much of a GPU's memory: 24GB; default: what is free")
    ] = None,
    checkpoint_seconds: Annotated[
        float | None, typer.Option(help="Save the state this often; default: 60, more for large networks")
    ] = None,
) -> None:
    """Train a router for the run's partition. It needs no expert, so it can be trained before they come back.

    A router that lies in the run becomes the model's own, in a new version;
    a blind one does not.

    Examples:

      atoll router runs/flowers

      atoll router runs/flowers --set training.images=500000

      atoll router runs/flowers --blind --out runs/flowers/router-blind
    """
    place = Store.at(run)
    version = open_ensemble(place)
    data = open_reference(place, version.data, "data")
    partition = open_reference(place, version.partition, "partition")
    how = [text.removeprefix(HOW) for text in overrides if text.startswith(HOW)]
    what = [text for text in overrides if not text.startswith(HOW)]
    plan = read_settings(router_plan(data, partition, blind=blind, seed=seed), overrides=what)
    folder = Store.at(out) if out else place.child("router")
    if not folder.is_local:
        raise UserError(f"--out: a router is trained in a local folder; give one with --out and copy it to {run}")
    there = find(folder) is not None
    with watching("the router", quiet=there) as watch:
        artifact = train_router(
            data,
            partition,
            folder.path,
            plan,
            resources=Resources(device, None if memory is None else parse_memory(memory), parse_overrides(how)),
            checkpoint_seconds=checkpoint_seconds,
            watch=watch,
        )
    line = f"router {artifact.digest[:12]} {'already there' if there else 'in'} [bold]{folder}[/bold]"
    console.print(line, soft_wrap=True)
    if (accuracy := accuracy_line(artifact, blind)) is not None:
        say(accuracy)
    if not blind and folder.parent == place:
        now = register_router(place, artifact)
        console.print(f"fuses the experts of [bold]{place}[/bold] since version {now.version}", soft_wrap=True)


def accuracy_line(artifact: Artifact, blind: bool) -> str | None:
    """How often the router is right, the mean over all times it was tested at; None where nothing was left to test."""
    table = json.loads(artifact.read("accuracy.json"))
    if not table["t"]:
        return None
    line = f"tells the cluster of {mean(table['accuracy']):.1%} of unseen images, averaged over noise levels"
    return line if blind else f"{line}; without the prompt {mean(table['accuracy_unconditional']):.1%}"
