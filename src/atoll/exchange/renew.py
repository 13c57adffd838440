"""A run that goes on: late data, and orders given out again. What is there stays, and is measured anew."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..artifacts import Artifact, Reference, Store, UserError, find
from ..data.progress import Progress, silent
from ..ensemble.changes import change_ensemble, grew_from, register_orders, with_orders
from ..ensemble.checks import Checks
from ..ensemble.versions import (
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
from ..islands.expert import load_expert
from ..islands.order import Order
from ..planning.again import Change, grown_clusters, order_again, plan_again
from .measure import measure


def accept_orders(
    run: Store, data: Artifact, partition: Artifact, orders: Artifact, *, progress: Progress = silent
) -> Version:
    """Accept experts trained for these orders, in a new version of the model.

    If the partition grew from the model's with late data, the model moves onto it: its experts stay, and the new
    version has their errors on the newest holdout.
    """
    now = find_ensemble(run)
    if now is None or not grew_from(partition, now):
        return register_orders(run, data, partition, orders)
    checks, new = Checks(run), reference_to(run, orders)
    known: dict[str, ValidationLoss | None] = {}

    def moved(now: Version | None) -> Version:
        after = with_orders(run, now, data, partition, new)
        if now is None or after.partition == now.partition:
            return after
        members = []
        for done, member in enumerate(after.experts):
            progress("measuring experts on the newest data", done, len(after.experts))
            if member.digest not in known:  # somebody may have admitted one since the last try
                order = checks.orders_of(after).get(member.order)
                known[member.digest] = None if order is None else measured_anew(run, member, order, data, partition)
            members.append(member.model_copy(update={"val_loss": known[member.digest]}))
        return after.model_copy(update={"experts": tuple(members)})

    return change_ensemble(run, moved, f"grew onto {partition.store.name}, planned {orders.store.name}")


def measured_anew(
    run: Store, member: Member, order: Order, data: Artifact, partition: Artifact
) -> ValidationLoss | None:
    """An admitted expert on this data's holdout; None if it is not there to be measured."""
    try:
        expert = load_expert(place_of(run, member))
    except UserError:
        return None
    return None if expert.digest != member.digest else measure(expert, order, data, partition)


def plan_onto(
    run: Store,
    data: Artifact,
    partition: Artifact,
    onto: Artifact,
    out: Store,
    *,
    grown_by: float,
    from_scratch: bool,
    change: Change,
    asked: Mapping[str, Any],
    progress: Progress = silent,
) -> tuple[Artifact, Version]:
    """New orders for the clusters that grew by a share of `grown_by` or more, and the model moved onto the late data.

    `onto` are the orders that the new ones name as parent, the newest of the model. `asked` is what `change` does, in
    the user's words.
    """
    version = open_ensemble(run)
    again = partition.digest == version.partition.digest  # the same command, after it was done
    if not again and not grew_from(partition, version):
        raise UserError(
            f"{partition.store}: did not grow from {version.partition.path}, which the model is of; "
            f"make it with `atoll partition {data.store} --onto {run}/{version.partition.path}`"
        )
    if find(out) is None and onto.digest != version.orders[-1].digest:
        newest = version.orders[-1].path
        raise UserError(f"--onto {onto.store}: these are not the newest orders of the model; use --onto {run}/{newest}")
    older = (*version.earlier, version.partition)[-2 if again else -1]

    def make() -> list[Order]:
        grown = grown_clusters(partition, open_reference(run, older, "partition"), grown_by)
        return orders_for(run, version, grown, data, partition, from_scratch, change)

    request = {"grown_by": grown_by, "from_scratch": from_scratch, **asked}
    orders = plan_again(data, partition, onto, out, request, make)
    return orders, accept_orders(run, data, partition, orders, progress=progress)


def reissue(
    run: Store,
    clusters: Sequence[int],
    out: Store | None,
    *,
    from_scratch: bool,
    change: Change,
    asked: Mapping[str, Any],
) -> tuple[Artifact, Version]:
    """Give the orders of these clusters out anew.

    The expert that serves a cluster is trained on, and may be replaced by what comes back. Asked for the same thing
    once more before that, it finds the orders there.
    """
    version = open_ensemble(run)
    if bad := [cluster for cluster in clusters if not 0 <= cluster < version.clusters]:
        raise UserError(f"--reissue {bad[0]}: no such cluster; the model has 0 to {version.clusters - 1}")
    data = open_reference(run, version.data, "data")
    partition = open_reference(run, version.partition, "partition")
    newest = open_reference(run, version.orders[-1], "orders")
    starts = {str(k): start.digest for k, start in starts_of(run, version, clusters, from_scratch).items()}
    request = {"reissue": sorted(set(clusters)), "starts": starts, "from_scratch": from_scratch, **asked}
    if newest.config.get("request") == request and newest.manifest.parents["partition"] == partition.digest:
        return newest, version

    def make() -> list[Order]:
        return orders_for(run, version, sorted(set(clusters)), data, partition, from_scratch, change)

    orders = plan_again(data, partition, newest, out or place_after(newest, request), request, make)
    return orders, accept_orders(run, data, partition, orders)


def place_after(newest: Artifact, request: Mapping[str, Any]) -> Store:
    """The next place for orders that is free, or holds these: one may have been left by a model that went back."""
    place = newest.store.successor
    while (there := find(place)) is not None and (
        there.config.get("request") != request or there.manifest.parents.get("orders") != newest.digest
    ):
        place = place.successor
    return place


def orders_for(
    run: Store,
    version: Version,
    clusters: Sequence[int],
    data: Artifact,
    partition: Artifact,
    from_scratch: bool,
    change: Change,
) -> list[Order]:
    """A new order for each of these clusters: that of the expert to be trained on, or else the newest there is."""
    accepted = Checks(run).orders_of(version)
    newest = {order.cluster: order for order in accepted.values()}
    serving = {member.cluster: accepted.get(member.order) for member in version.serving}
    starts, orders = starts_of(run, version, clusters, from_scratch), []
    for cluster in clusters:
        old = serving[cluster] if cluster in starts else newest.get(cluster)
        if old is None:
            raise UserError(f"{run}: the order of cluster {cluster} is not there to be given out again; put it back")
        orders.append(order_again(old, data, partition, len(version.orders), starts.get(cluster), change))
    return orders


def starts_of(run: Store, version: Version, clusters: Sequence[int], from_scratch: bool) -> dict[int, Reference]:
    """The expert that serves each of these clusters, where one does, to be trained on."""
    if from_scratch:
        return {}
    members = {member.cluster: member for member in version.serving if member.cluster in clusters}
    for member in members.values():
        if not is_whole(run, member):
            raise UserError(
                f"{run}/{member.path}: is missing, so it cannot be trained on; put it back, or add --from-scratch"
            )
    return {k: Reference(path=member.path, digest=member.digest) for k, member in members.items()}
