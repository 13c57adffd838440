"""New orders for clusters that have one: after data was added, or to train an expert further.

Such an order is the older one with the shards of the newest partition and another seed. It begins from the expert that
is active for its cluster, which it names, unless it is to train from scratch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..artifacts import Artifact, Reference, Store, UserError, find
from ..data.progress import Progress, silent
from ..exchange.holdout import Holdout, validation_loss
from ..islands.expert import load_expert
from ..islands.order import Order
from ..registry.changes import change_ensemble, grew_from, register_orders, with_orders
from ..registry.checks import accepted_orders
from ..registry.versions import (
    Member,
    ValidationLoss,
    Version,
    find_ensemble,
    is_whole,
    open_ensemble,
    open_reference,
    place_of,
)
from ..training.seeds import seed_from
from .stage import open_parents, shard_refs, train_counts, validated, write_orders

CHANGEABLE = ("training", "acceptance")
FROM_SCRATCH = (*CHANGEABLE, "architecture", "objective")


@dataclass(frozen=True)
class Changes:
    """What differs in the new orders: settings, as `apply` sets and `overrides` names them, and initial weights."""

    apply: Callable[[Order], Order] = lambda order: order
    overrides: Sequence[str] = ()
    from_scratch: bool = False


def reissue(run: Store, clusters: Sequence[int], out: Store | None, changes: Changes) -> tuple[Artifact, Version]:
    """Orders for these clusters. The expert that is active there is trained further, and may be replaced by the result.

    The same request finds its orders there until an expert of them is active.
    """
    version, clusters = open_ensemble(run), sorted(set(clusters))
    if bad := [cluster for cluster in clusters if not 0 <= cluster < version.clusters]:
        raise UserError(f"--reissue {bad[0]}: no such cluster; the model has 0 to {version.clusters - 1}")
    serving = {str(member.cluster): member.digest for member in version.serving if member.cluster in clusters}
    return issue(run, version, clusters, out, changes, {"reissue": serving})


def reissue_grown(
    run: Store,
    data: Artifact,
    partition: Artifact,
    onto: Artifact,
    out: Store | None,
    changes: Changes,
    *,
    grown_by: float,
    progress: Progress = silent,
) -> tuple[Artifact, Version]:
    """The model moved onto larger data, and orders for clusters that grew by a fraction of `grown_by` or more.

    `onto` are orders of the model. There may be no cluster that grew so much, and so no order.
    """
    move_onto(run, data, partition, progress=progress)
    version = open_ensemble(run)
    if version.partition.digest != partition.digest or not version.earlier:
        raise UserError(
            f"{partition.store}: did not grow from {version.partition.path}, the model's partition; "
            f"make it with `atoll partition {data.store} --onto {run}/{version.partition.path}`"
        )
    if onto.digest not in {reference.digest for reference in version.orders}:
        raise UserError(f"--onto {onto.store}: is not of this model; use {run}/{version.orders[-1].path}")
    now, then = train_counts(partition), train_counts(open_reference(run, version.earlier[-1], "partition"))
    grown = [k for k in range(len(now)) if now[k] > then[k] and now[k] >= (1 + grown_by) * then[k]]
    return issue(run, version, grown, out, changes, {"grown_by": grown_by, "onto": onto.digest})


def issue(
    run: Store, version: Version, clusters: Sequence[int], out: Store | None, changes: Changes, asked: dict[str, Any]
) -> tuple[Artifact, Version]:
    """Orders for these clusters on the model's data, and a version that accepts them; or those that are there.

    They lie in `out`, or after the first ones as orders-2, ...; what was `asked` identifies them there.
    """
    data = open_reference(run, version.data, "data")
    partition = open_reference(run, version.partition, "partition")
    request = {**asked, "partition": partition.digest, "set": [*changes.overrides], "scratch": changes.from_scratch}
    place = out or place_of(run, version.orders[0]).successor
    while (orders := find(place)) is not None and orders.config.get("request") != request:
        if out is not None:
            raise UserError(f"--out {out}: already exists; choose another folder")
        place = place.successor
    if orders is None:
        open_parents(data.store, partition.store, place)
        inits = {} if changes.from_scratch else active_experts(run, version, clusters)
        old, generation = sources_of(run, version, clusters, inits), len(version.orders)
        made = [reissue_order(old[k], data, partition, generation, inits.get(k), changes) for k in clusters]
        settings = {"request": request, "chosen": [describe(order) for order in made], "islands": []}
        orders = write_orders(place, made, settings, data, partition, {"orders": version.orders[-1].digest})
    return orders, register_orders(run, data, partition, orders)


def active_experts(run: Store, version: Version, clusters: Sequence[int]) -> dict[int, Reference]:
    """The expert that is active for each of these clusters, where there is one, to begin from."""
    members = {member.cluster: member for member in version.serving if member.cluster in clusters}
    for member in members.values():
        if not is_whole(run, member):
            raise UserError(
                f"{run}/{member.path}: is missing, so it cannot be trained further; put it back, or add --from-scratch"
            )
    return {k: Reference(path=member.path, digest=member.digest) for k, member in members.items()}


def sources_of(
    run: Store, version: Version, clusters: Sequence[int], inits: Mapping[int, Reference]
) -> dict[int, Order]:
    """The order to issue again for each cluster: that of the expert to begin from, or else the newest one."""
    accepted = {digest: each.order for digest, each in accepted_orders(run, version).items()}
    found: dict[int | None, Order | None] = {order.cluster: order for order in accepted.values()}
    found |= {member.cluster: accepted.get(member.order) for member in version.serving if member.cluster in inits}
    sources = {k: order for k in clusters if (order := found.get(k)) is not None}
    if missing := set(clusters) - set(sources):
        raise UserError(f"{run}: the order of cluster {min(missing)} is missing, so it cannot be reissued; put it back")
    return sources


def reissue_order(
    old: Order, data: Artifact, partition: Artifact, generation: int, init: Reference | None, changes: Changes
) -> Order:
    """An older order with the newest shards and the settings that `changes` makes of its own.

    Its seed follows from the old one and `generation`, the number of orders artifacts before it, so that continued
    training does not repeat the same noise.
    """
    changed, allowed = changes.apply(old), FROM_SCRATCH if init is None else CHANGEABLE
    for name in Order.model_fields:
        if name not in allowed and getattr(changed, name) != getattr(old, name):
            why = "" if init is None else ", since it begins from an expert: add --from-scratch"
            raise UserError(
                f"--set {name}: cannot be changed in order {old.name}{why}; what can be is {', '.join(allowed)}"
            )
    update = {
        "data": data.digest,
        "partition": partition.digest,
        "shards": shard_refs(partition, f"clusters/{old.cluster:02d}/"),
        "training": changed.training.model_copy(update={"seed": seed_from(changed.training.seed, "again", generation)}),
        "license": data.manifest.license,
        "init": init,
    }
    return validated(changed.model_copy(update=update))


def describe(order: Order) -> str:
    begin = "" if order.init is None else f", from {order.init.name}"
    return f"{order.objective.kind} on {order.objective.schedule.name}{begin}"


def accept_orders(run: Store, data: Artifact, partition: Artifact, orders: Artifact) -> Version:
    """Accept experts trained for these orders, in a new version of the model, moved onto this partition if it grew."""
    move_onto(run, data, partition)
    return register_orders(run, data, partition, orders)


def move_onto(run: Store, data: Artifact, partition: Artifact, *, progress: Progress = silent) -> None:
    """Move the model onto a partition that grew from its own: experts stay, measured on the newest holdout."""
    now = find_ensemble(run)
    if now is None or not grew_from(partition, now):
        return
    measured: dict[str, ValidationLoss | None] = {}

    def moved(now: Version | None) -> Version:
        after = with_orders(run, now, data, partition, None)
        accepted = {digest: each.order for digest, each in accepted_orders(run, after).items()}
        for done, member in enumerate(after.experts):
            progress("measuring experts on the newest data", done, len(after.experts))
            if member.digest not in measured:  # else by an attempt that another change overtook
                measured[member.digest] = measure_member(run, member, accepted.get(member.order), data, partition)
        members = (member.model_copy(update={"val_loss": measured[member.digest]}) for member in after.experts)
        return after.model_copy(update={"experts": tuple(members)})

    change_ensemble(run, moved, f"grew onto {partition.store.name}")


def measure_member(
    run: Store, member: Member, order: Order | None, data: Artifact, partition: Artifact
) -> ValidationLoss | None:
    """An admitted expert's validation loss on this data's holdout; None if it or its order cannot be read."""
    try:
        expert = load_expert(place_of(run, member))
    except UserError:
        return None
    if order is None or expert.digest != member.digest:
        return None
    return validation_loss(expert, order, Holdout.of(data, partition))
