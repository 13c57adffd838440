"""atoll router: train what fuses the experts."""

from __future__ import annotations

import json
from statistics import mean
from typing import Annotated

import typer

from ..artifacts import Artifact, Store, UserError, find
from ..ensemble.file import find_ensemble, register_router
from ..islands.order import read_order
from ..models.dit import DiTConfig
from ..router.recipes import router_plan
from ..router.train import train_router
from ..training.resources import Resources, parse_memory
from .bars import console
from .settings import parse_overrides, read_settings
from .watching import say, watching

HOW = "execution."  # settings of how it is computed, which a plan has none of


def router(
    run: Annotated[str, typer.Argument(help="The run; its data and partition are all that is read")],
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

    If the run has an ensemble.json and the router lies in the run, it is
    registered there; a blind one is not.

    Examples:

      atoll router runs/flowers

      atoll router runs/flowers --set training.images=500000

      atoll router runs/flowers --blind --out runs/flowers/router-blind
    """
    place = Store.at(run)
    data, partition = Artifact.open(place.child("data"), "data"), Artifact.open(place.child("partition"), "partition")
    how = [text.removeprefix(HOW) for text in overrides if text.startswith(HOW)]
    what = [text for text in overrides if not text.startswith(HOW)]
    experts = ordered(place)
    plan = read_settings(router_plan(data, partition, blind=blind, seed=seed, experts=experts), overrides=what)
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
    if not blind and folder.parent == place and find_ensemble(place) is not None:
        register_router(place, artifact, folder.name)
        console.print("registered in [bold]ensemble.json[/bold]")


def ordered(run: Store) -> list[DiTConfig]:
    """The architectures of the run's orders, if it has any yet: the router is sized for them."""
    orders = find(run.child("orders"))
    return [] if orders is None else [read_order(orders.file(name))[0].architecture for name in orders.names()]


def accuracy_line(artifact: Artifact, blind: bool) -> str | None:
    """How often the router is right, the mean over all times it was tested at; None where nothing was left to test."""
    table = json.loads(artifact.read("accuracy.json"))
    if not table["t"]:
        return None
    line = f"tells the cluster of {mean(table['accuracy']):.1%} of unseen images, averaged over noise levels"
    return line if blind else f"{line}; without the prompt {mean(table['accuracy_unconditional']):.1%}"
