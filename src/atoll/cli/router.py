"""atoll router: train what weights the experts."""

from __future__ import annotations

import json
from statistics import mean
from typing import Annotated

import typer

from ..artifacts import Artifact, Store, UserError, find
from ..registry.changes import register_router
from ..registry.checks import accepted_orders
from ..registry.versions import Version, open_ensemble, open_reference, place_of
from ..router.recipes import refresh_plan, router_plan
from ..router.train import RouterPlan, RouterStart, train_router
from ..training.distributed import is_main
from ..training.resources import Resources
from .options import CheckpointSeconds, Device, Memory, Settings, gib, with_settings
from .progress import progress
from .tables import print_line

TRUNK = ("latent", "condition", "classes", "vocabulary", "text_width", "text_length")
FROM_DATA = {"network.clusters", *(f"network.trunk.{name}" for name in TRUNK)}


@with_settings(RouterPlan)
def router(
    run: Annotated[str, typer.Argument(help="The run; only its newest data and partition are read.")],
    *,
    out: Annotated[str | None, typer.Option(help="Folder to write (default: RUN/router; later router-2, ...).")] = None,
    blind: Annotated[bool, typer.Option("--blind", help="Give it the noisy latent and the time, no prompt.")] = False,
    seed: Annotated[int, typer.Option(help="Seed of weights, noise and sequence.")] = 0,
    settings: Settings,
    from_scratch: Annotated[bool, typer.Option("--from-scratch", help="Start from random weights.")] = False,
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
        experts = [each.order for each in accepted_orders(place, version).values() if each.order.cluster is not None]
        start, plan = None, router_plan(data, partition, blind=blind, seed=seed, experts=experts)
    settings_of_plan = settings.without("compute")
    if fixed := sorted(settings_of_plan.names & FROM_DATA):
        raise UserError(f"--set {fixed[0]}: follows from the data and the partition; leave it out")
    plan = settings_of_plan.over_plan(plan)
    settings.show(plan, f"the router of {place.name}")
    main = is_main()  # of several processes that train together one prints
    with progress(quiet=there is not None or not main) as display:
        if older is not None and there is None and main:
            print_line(f"continues training from {older.store.name}; --from-scratch does not")
        artifact = train_router(
            data,
            partition,
            folder.path,
            plan,
            start=start,
            resources=Resources(device, gib(memory), settings.part("compute")),
            checkpoint_seconds=checkpoint_seconds,
            watch=display.training("training the router"),
        )
    if artifact is None or not main:
        return
    print_line(f"router {artifact.digest[:12]} {'already there' if there else 'in'} {folder}")
    print_accuracy(artifact)
    if not blind and folder.parent == place:
        print_line(f"weights the experts of {place} since version {register_router(place, artifact).version}")


def older_router(run: Store, version: Version) -> Artifact | None:
    """The model's router, if it is there and of a partition that has grown since."""
    if version.router is None or find(place_of(run, version.router)) is None:
        return None
    artifact = open_reference(run, version.router, "router")
    return artifact if artifact.manifest.parents["partition"] != version.partition.digest else None


def default_place(run: Store, version: Version, older: Artifact | None) -> Store:
    """Where the router goes: in the place of the model's own, or the next where that one is of an older partition."""
    if older is not None:
        return older.store.successor
    return run.child("router") if version.router is None else place_of(run, version.router)


def print_accuracy(artifact: Artifact) -> None:
    """How often a router is right, over the times it was tested at; nothing where nothing was left to test."""
    table = json.loads(artifact.read("accuracy.json"))
    if table["t"]:
        without = f"; without the prompt {mean(table['accuracy_unconditional']):.1%}"
        line = f"router accuracy {mean(table['accuracy']):.1%} on unseen images, averaged over noise levels"
        print_line(line if table["accuracy_unconditional"] == table["accuracy"] else line + without)
