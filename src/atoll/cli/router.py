"""atoll router: train what fuses the experts."""

from __future__ import annotations

import json
from statistics import mean
from typing import Annotated

import typer

from ..artifacts import Artifact, Store, UserError, find
from ..islands.order import Order
from ..registry.changes import register_router
from ..registry.checks import Checks
from ..registry.versions import Version, open_ensemble, open_reference, place_of
from ..router.recipes import refresh_plan, router_plan
from ..router.train import RouterPlan, RouterStart, train_router
from ..training.resources import Resources, parse_memory
from .options import CheckpointSeconds, Device, Memory, Settings, with_settings
from .progress import console, print_line, progress

FROM_DATA = ("latent", "condition", "classes", "vocabulary", "text_width", "text_length")  # of the trunk


@with_settings(RouterPlan)
def router(
    run: Annotated[str, typer.Argument(help="The run; only its newest data and partition are read.")],
    *,
    out: Annotated[str | None, typer.Option(help="Folder to write (default: RUN/router; later router-2, ...).")] = None,
    blind: Annotated[bool, typer.Option("--blind", help="Give it the noisy latent and the time, no prompt.")] = False,
    seed: Annotated[int, typer.Option(help="Seed of weights, noise and sequence.")] = 0,
    settings: Settings,
    from_scratch: Annotated[
        bool, typer.Option("--from-scratch", help="Start from random weights, not the older's.")
    ] = False,
    device: Device = None,
    memory: Memory = None,
    checkpoint_seconds: CheckpointSeconds = None,
) -> None:
    """Train the router of a run's newest partition. It needs no expert, so it can be trained before they come back.

    A router in the run becomes part of the model, as a new version; a blind one does not.
    When data was added, the older router is trained further, on a quarter of the images.

    \b
    Examples:
      atoll router runs/flowers
      atoll router runs/flowers --print-config
      atoll router runs/flowers --set training.images=500k --set network.trunk.width=256
      atoll router runs/flowers --blind --out runs/flowers/router-blind
    """
    place = Store.at(run)
    version = open_ensemble(place)
    data = open_reference(place, version.data, "data")
    partition = open_reference(place, version.partition, "partition")
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
    plan = changed(plan, settings.without("execution"))
    settings.show(plan, f"the router of {place.name}")
    with progress(quiet=there is not None) as display:
        if older is not None and there is None:
            print_line(f"continues training from {older.store.name}; --from-scratch does not")
        artifact = train_router(
            data,
            partition,
            folder.path,
            plan,
            start=start,
            resources=Resources(device, None if memory is None else parse_memory(memory), settings.part("execution")),
            checkpoint_seconds=checkpoint_seconds,
            watch=display.training("training the router"),
        )
    line = f"router {artifact.digest[:12]} {'already there' if there else 'in'} [bold]{folder}[/bold]"
    console.print(line, soft_wrap=True)
    if (accuracy := accuracy_line(artifact, blind)) is not None:
        print_line(accuracy)
    if not blind and folder.parent == place:
        now = register_router(place, artifact)
        console.print(f"fuses the experts of [bold]{place}[/bold] since version {now.version}", soft_wrap=True)


def changed(plan: RouterPlan, settings: Settings) -> RouterPlan:
    """A plan with what the user sets; warm-up and average keep their share of another budget."""
    new = settings.over(plan)
    if new.network.clusters != plan.network.clusters:
        raise UserError("--set network.clusters: is as the partition has it; leave it out")
    for name in FROM_DATA:
        if getattr(new.network.trunk, name) != getattr(plan.network.trunk, name):
            raise UserError(f"--set network.trunk.{name}: is as the data has it; leave it out (--blind: no condition)")
    return new.model_copy(update={"training": settings.keep_shares(plan.training, new.training)})


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
