"""atoll router: train what fuses the experts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from statistics import mean
from typing import Annotated

import typer

from ..artifacts import Artifact, Store, UserError, find
from ..ensemble.changes import register_router
from ..ensemble.checks import Checks
from ..ensemble.versions import Version, clean_run, open_ensemble, open_reference, place_of
from ..islands.order import Order
from ..router.recipes import refresh_plan, router_plan
from ..router.train import RouterPlan, RouterStart, train_router
from ..training.resources import Resources, parse_memory
from .progress import console, print_line, progress
from .settings import kept_shares, parse_overrides, read_settings, settings_table
from .training_options import CheckpointSeconds, Device, Memory, SettingsOnly

HOW = "execution."  # settings of how it is computed, which a plan has none of
FROM_DATA = ("latent", "condition", "classes", "vocabulary", "text_width", "text_length")  # of the trunk


def router(
    run: Annotated[str, typer.Argument(help="The run; its newest data and partition are all that is read")],
    out: Annotated[
        str | None, typer.Option(help="Folder for the router; default: RUN/router, and RUN/router-2 after late data")
    ] = None,
    blind: Annotated[bool, typer.Option(help="Let it see the noisy latent and the time only, not the prompt")] = False,
    seed: Annotated[int, typer.Option(help="Seed of weights, noise and order")] = 0,
    overrides: Annotated[
        list[str], typer.Option("--set", help="training.images=200000; how to compute: execution.precision=float32")
    ] = [],  # noqa: B006
    from_scratch: Annotated[
        bool, typer.Option("--from-scratch", help="After late data: do not go on from the older router's weights")
    ] = False,
    device: Device = None,
    memory: Memory = None,
    checkpoint_seconds: CheckpointSeconds = None,
    settings_only: SettingsOnly = False,
) -> None:
    """Train a router for the run's newest partition. It needs no expert, so it can be trained before they come back.

    A router that lies in the run becomes the model's own, in a new version;
    a blind one does not. When the partition has grown with late data, the
    model's router is trained on from its weights, for a quarter of the images.

    Examples:

      atoll router runs/flowers

      atoll router runs/flowers --settings

      atoll router runs/flowers --set training.images=500k --set network.trunk.width=256

      atoll router runs/flowers --blind --out runs/flowers/router-blind
    """
    place = clean_run(run)
    version = open_ensemble(place)
    data = open_reference(place, version.data, "data")
    partition = open_reference(place, version.partition, "partition")
    how = [text.removeprefix(HOW) for text in overrides if text.startswith(HOW)]
    what = [text for text in overrides if not text.startswith(HOW)]
    older = older_router(place, version)
    folder = Store.at(out) if out else default_place(place, version, older)
    if not folder.is_local:
        raise UserError(f"--out: a router is trained in a local folder; give one with --out and copy it to {run}")
    there = find(folder)
    if blind or from_scratch:
        older = None
    started = None if blind or from_scratch or there is None else there.manifest.parents.get("start")
    if there is not None and started is not None:
        start, plan = RouterStart(started, None), RouterPlan.model_validate(there.config["plan"])
    elif there is None and older is not None:
        start, plan = RouterStart(older.digest, older.store), refresh_plan(older, seed=seed)
    else:
        experts = ordered(place, version)
        start, plan = None, router_plan(data, partition, blind=blind, seed=seed, experts=experts)
    plan = told_router(plan, what)
    if settings_only:
        console.print(settings_table(plan, f"the router of {place.name}"))
        return
    with progress(quiet=there is not None) as display:
        if older is not None and there is None:
            print_line(f"trains on from the weights of {older.store.name}; --from-scratch does not")
        artifact = train_router(
            data,
            partition,
            folder.path,
            plan,
            start=start,
            resources=Resources(device, None if memory is None else parse_memory(memory), parse_overrides(how)),
            checkpoint_seconds=checkpoint_seconds,
            watch=display.training(),
        )
    line = f"router {artifact.digest[:12]} {'already there' if there else 'in'} [bold]{folder}[/bold]"
    console.print(line, soft_wrap=True)
    if (accuracy := accuracy_line(artifact, blind)) is not None:
        print_line(accuracy)
    if not blind and folder.parent == place:
        now = register_router(place, artifact)
        console.print(f"fuses the experts of [bold]{place}[/bold] since version {now.version}", soft_wrap=True)


def told_router(plan: RouterPlan, overrides: Sequence[str]) -> RouterPlan:
    """A plan with what the user says; warm-up and average keep their share of another budget."""
    told = read_settings(plan, overrides=overrides)
    if told.network.clusters != plan.network.clusters:
        raise UserError("--set network.clusters: is as the partition has it; leave it out")
    for name in FROM_DATA:
        if getattr(told.network.trunk, name) != getattr(plan.network.trunk, name):
            raise UserError(f"--set network.trunk.{name}: is as the data has it; leave it out (--blind: no condition)")
    return told.model_copy(update={"training": kept_shares(plan.training, told.training, overrides)})


def older_router(run: Store, version: Version) -> Artifact | None:
    """The model's router, if it is there and of a partition that has grown since."""
    if version.router is None or find(place_of(run, version.router)) is None:
        return None
    artifact = open_reference(run, version.router, "router")
    return artifact if artifact.manifest.parents["partition"] != version.partition.digest else None


def default_place(run: Store, version: Version, older: Artifact | None) -> Store:
    """Where the router goes: in the place of the model's own, or beside it where that one is of an older partition."""
    if older is not None:
        return older.store.successor
    return run.child("router") if version.router is None else place_of(run, version.router)


def ordered(run: Store, version: Version) -> list[Order]:
    """What is ordered from islands: the router is sized for it."""
    return [order for order in Checks(run).orders_of(version).values() if order.cluster is not None]


def accuracy_line(artifact: Artifact, blind: bool) -> str | None:
    """How often the router is right, the mean over all times it was tested at; None where nothing was left to test."""
    table = json.loads(artifact.read("accuracy.json"))
    if not table["t"]:
        return None
    line = f"tells the cluster of {mean(table['accuracy']):.1%} of unseen images, averaged over noise levels"
    return line if blind else f"{line}; without the prompt {mean(table['accuracy_unconditional']):.1%}"
