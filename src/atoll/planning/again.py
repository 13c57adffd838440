"""Orders after the first ones: for clusters that grew with late data, and for an expert that should learn more.

A new order is an older one of its cluster with the shards of the newest partition and another seed. Where the cluster
has an expert already, its weights are trained on; the order names it, so that the island finds it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..artifacts import Artifact, ArtifactWriter, Reference, Store, UserError, find, load_if_same
from ..islands.order import Order
from ..training.seeds import seed_from
from .stage import KIND, check_places, shard_refs

CHANGEABLE = ("training", "acceptance")
FROM_SCRATCH = (*CHANGEABLE, "architecture", "objective")  # of an order that trains no expert on
Change = Callable[[Order], Order]


def grown_clusters(partition: Artifact, before: Artifact, share: float) -> list[int]:
    """Clusters with more training samples than before: by this share of what they had, or more."""
    now, then = (
        [cluster["train"] for cluster in json.loads(cut.read("sizes.json"))["clusters"]] for cut in (partition, before)
    )
    return [k for k in range(len(now)) if now[k] > then[k] and now[k] >= (1 + share) * then[k]]


def order_again(
    old: Order, data: Artifact, partition: Artifact, generation: int, init: Reference | None, change: Change
) -> Order:
    """An older order anew, with what `change` makes of its settings.

    Its seed follows from the old one and `generation`, the number of orders artifacts before it: with the old seed an
    expert that is trained on would meet the same images with the same noise once more.
    """
    assert old.cluster is not None, "the order of a monolith is not given out again"
    told = change(old)
    allowed = FROM_SCRATCH if init is None else CHANGEABLE
    for name in Order.model_fields:
        if name not in allowed and getattr(told, name) != getattr(old, name):
            why = "" if init is None else ", since its expert is trained on: add --from-scratch"
            may = ", ".join(allowed)
            raise UserError(f"--set {name}: cannot be changed in order {old.name}{why}; what can be is {may}")
    training = told.training.model_copy(update={"seed": seed_from(told.training.seed, "again", generation)})
    update = {
        "data": data.digest,
        "partition": partition.digest,
        "shards": shard_refs(partition, f"clusters/{old.cluster:02d}/"),
        "training": training,
        "license": data.manifest.license,
        "init": init,
    }
    return Order.model_validate(told.model_copy(update=update).model_dump())


def plan_again(
    data: Artifact,
    partition: Artifact,
    before: Artifact,
    out: Store,
    request: Mapping[str, Any],
    make: Callable[[], Sequence[Order]],
) -> Artifact:
    """Write the orders that `make` makes, which may be none, to `out`, with the orders `before` them as parent.

    `request` is what was asked for: the same request finds them there, whatever has happened to the experts since.
    """
    check_places(data, partition, out)
    parents = {"data": data.digest, "partition": partition.digest, "orders": before.digest}
    if (there := find(out)) is not None:
        same = load_if_same(out, KIND, {**there.config, "request": dict(request)}, parents)
        assert same is not None
        return same
    orders = make()
    settings = {"request": dict(request), "chosen": [kind_of(order) for order in orders], "islands": []}
    with ArtifactWriter(out, KIND) as draft:
        for order in orders:
            (draft.folder / f"{order.name}.json").write_bytes(order.to_bytes())
        return draft.commit(config=settings, parents=parents, license=data.manifest.license)


def kind_of(order: Order) -> str:
    """For people: what an order asks for, and what it goes on from."""
    asked = f"{order.objective.kind} on {order.objective.schedule.name}"
    return asked if order.init is None else f"{asked}, from {order.init.name}"
