"""New orders for clusters that have one: after data was added, or to train an expert further.

Such an order is the older one with the shards of the newest partition and another seed. It begins from the expert that
is active for its cluster, which it names, unless it is to train from scratch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..artifacts import Artifact, Reference, Store, UserError, find, load_if_same
from ..data.progress import Progress, silent
from ..exchange.holdout import Holdout, validation_loss
from ..islands.expert import load_expert
from ..islands.order import Order
from ..registry.changes import change_ensemble, grew_from, register_orders, with_orders
from ..registry.checks import Checks
from ..registry.versions import (
    Member,
    ValidationLoss,
    Version,
    find_ensemble,
    is_whole,
    open_ensemble,
    open_reference,
    place_of,
    reference_to,
)
from ..training.seeds import seed_from
from .stage import KIND, open_parents, shard_refs, train_counts, write_orders

CHANGEABLE = ("training", "acceptance")
FROM_SCRATCH = (*CHANGEABLE, "architecture", "objective")


@dataclass(frozen=True)
class Changes:
    """What differs in the new orders: settings, as `apply` sets and `overrides` names them, and initial weights."""

    apply: Callable[[Order], Order] = lambda order: order
    overrides: Sequence[str] = field(default_factory=tuple)
    from_scratch: bool = False

    def request(self, **of: Any) -> dict[str, Any]:
        """What identifies a request in a manifest: the same one finds its orders there."""
        return {**of, "set": list(self.overrides), "from_scratch": self.from_scratch}


def accept_orders(
    run: Store, data: Artifact, partition: Artifact, orders: Artifact, *, progress: Progress = silent
) -> Version:
    """Accept experts trained for these orders, in a new version of the model.

    If the partition grew from the model's, the model moves onto it: its experts stay, with their validation loss on the
    newest holdout.
    """
    now = find_ensemble(run)
    if now is None or not grew_from(partition, now):
        return register_orders(run, data, partition, orders)
    checks, new = Checks(run), reference_to(run, orders)
    measured: dict[str, ValidationLoss | None] = {}

    def moved(now: Version | None) -> Version:
        after = with_orders(run, now, data, partition, new)
        if now is None or after.partition == now.partition:
            return after
        accepted = checks.orders_of(after)
        for done, member in enumerate(after.experts):
            progress("measuring experts on the newest data", done, len(after.experts))
            if member.digest not in measured:  # else by an attempt that another change overtook
                measured[member.digest] = measure_member(run, member, accepted.get(member.order), data, partition)
        members = (member.model_copy(update={"val_loss": measured[member.digest]}) for member in after.experts)
        return after.model_copy(update={"experts": tuple(members)})

    return change_ensemble(run, moved, f"grew onto {partition.store.name}, planned {orders.store.name}")


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
    """Orders for clusters that grew by a fraction of `grown_by` or more, and the model moved onto the larger data.

    `onto` are the newest orders of the model. There may be no cluster that grew so much, and so no order.
    """
    version = open_ensemble(run)
    partitions = [*version.earlier, version.partition]
    if grew_from(partition, version):
        partitions.append(reference_to(run, partition))
    if len(partitions) < 2 or partitions[-1].digest != partition.digest:
        raise UserError(
            f"{partition.store}: did not grow from {version.partition.path}, the model's partition; "
            f"make it with `atoll partition {data.store} --onto {run}/{version.partition.path}`"
        )
    request = changes.request(grown_by=grown_by, onto=onto.digest)
    place = place_for(run, version, partition, out, request)
    if find(place) is None and onto.digest != (newest := version.orders[-1]).digest:
        raise UserError(
            f"--onto {onto.store}: these are not the newest orders of the model; use --onto {run}/{newest.path}"
        )
    now, then = train_counts(partition), train_counts(open_reference(run, partitions[-2], "partition"))
    grown = [k for k in range(len(now)) if now[k] > then[k] and now[k] >= (1 + grown_by) * then[k]]
    inits = initial_experts(run, version, grown, changes)
    orders = write_again(run, version, grown, data, partition, place, changes, inits, request)
    return orders, accept_orders(run, data, partition, orders, progress=progress)


def reissue(run: Store, clusters: Sequence[int], out: Store | None, changes: Changes) -> tuple[Artifact, Version]:
    """Orders for these clusters. The expert that is active there is trained further, and may be replaced by the result.

    The same request finds its orders there until an expert of them is active.
    """
    version, clusters = open_ensemble(run), sorted(set(clusters))
    if bad := [cluster for cluster in clusters if not 0 <= cluster < version.clusters]:
        raise UserError(f"--reissue {bad[0]}: no such cluster; the model has 0 to {version.clusters - 1}")
    data = open_reference(run, version.data, "data")
    partition = open_reference(run, version.partition, "partition")
    inits = initial_experts(run, version, clusters, changes)
    request = changes.request(reissue=clusters, inits={str(k): init.digest for k, init in inits.items()})
    place = place_for(run, version, partition, out, request)
    orders = write_again(run, version, clusters, data, partition, place, changes, inits, request)
    return orders, accept_orders(run, data, partition, orders)


def place_for(run: Store, version: Version, partition: Artifact, out: Store | None, request: dict[str, Any]) -> Store:
    """`out`, or the folder after the first orders that holds those of this request, or else the next free one."""
    place = out or place_of(run, version.orders[0]).successor
    while out is None and (there := find(place)) is not None:
        if there.config.get("request") == request and there.manifest.parents["partition"] == partition.digest:
            break
        place = place.successor
    return place


def initial_experts(run: Store, version: Version, clusters: Sequence[int], changes: Changes) -> dict[int, Reference]:
    """The expert that is active for each of these clusters, where there is one, to begin from."""
    if changes.from_scratch:
        return {}
    members = {member.cluster: member for member in version.serving if member.cluster in clusters}
    for member in members.values():
        if not is_whole(run, member):
            raise UserError(
                f"{run}/{member.path}: is missing, so it cannot be trained further; put it back, or add --from-scratch"
            )
    return {k: Reference(path=member.path, digest=member.digest) for k, member in members.items()}


def write_again(
    run: Store,
    version: Version,
    clusters: Sequence[int],
    data: Artifact,
    partition: Artifact,
    place: Store,
    changes: Changes,
    inits: dict[int, Reference],
    request: dict[str, Any],
) -> Artifact:
    """A new order for each cluster, that of its active expert or else its newest one; the newest orders are the parent.

    Orders of the same request that are in `place` already are returned.
    """
    if (there := find(place)) is not None:
        same = load_if_same(place, KIND, {**there.config, "request": request}, there.manifest.parents)
        assert same is not None
        return same
    open_parents(data.store, partition.store, place)
    accepted = Checks(run).orders_of(version)
    sources: dict[int | None, Order | None] = {order.cluster: order for order in accepted.values()}
    sources |= {member.cluster: accepted.get(member.order) for member in version.serving if member.cluster in inits}
    orders, chosen = [], []
    for cluster in clusters:
        if (old := sources.get(cluster)) is None:
            raise UserError(f"{run}: the order of cluster {cluster} is missing, so it cannot be reissued; put it back")
        order = reissue_order(old, data, partition, len(version.orders), inits.get(cluster), changes)
        begin = "" if order.init is None else f", from {order.init.name}"
        orders.append(order)
        chosen.append(f"{order.objective.kind} on {order.objective.schedule.name}{begin}")
    parents = {"data": data.digest, "partition": partition.digest, "orders": version.orders[-1].digest}
    settings = {"request": request, "chosen": chosen, "islands": []}
    return write_orders(place, orders, settings, parents, data.manifest.license)


def reissue_order(
    old: Order, data: Artifact, partition: Artifact, generation: int, init: Reference | None, changes: Changes
) -> Order:
    """An older order with the newest shards and the settings that `changes` makes of its own.

    Its seed follows from the old one and `generation`, the number of orders artifacts before it, so that continued
    training does not repeat the same noise.
    """
    assert old.cluster is not None, "the order of a monolith is not reissued"
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
    return Order.model_validate(changed.model_copy(update=update).model_dump())
