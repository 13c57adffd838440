"""The expert that an order begins from, if not from random weights.

It is a converted checkpoint, a network trained on all clusters for a while, or the expert that an older order of the
cluster gave. With another schedule or kind than the order's it is trained through the bridge: its output is converted
to a velocity on the order's path, so the loss begins where the old network was, and the new expert keeps schedule, kind
and license. Only weights are taken over: the optimizer and the average begin anew.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..artifacts import Artifact, Store, UserError, find
from ..diffusion import Kind
from .expert import Expert, ExpertCard, all_licenses, load_expert
from .order import Order
from .task import process_of


def init_of(order: Order, root: Store, given: str | Path | None) -> Expert | None:
    """The expert to begin from: the one `given`, or else the one the order names, below `root`; None for random."""
    if order.init is None and given is None:
        return None
    place = place_of_init(order, root) if given is None else Store.at(given)
    if order.init is not None and Artifact.open(place).digest != order.init.digest:
        raise UserError(
            f"--init {place}: is not expert {order.init.digest[:12]}, which the order begins from; "
            f"get {order.init.path} of the run"
        )
    expert = load_expert(place)
    if (reason := mismatch(order, expert.card)) is not None:
        raise UserError(f"--init {place}: {reason}")
    return expert


def place_of_init(order: Order, root: Store) -> Store:
    """Where the expert that an order names lies: below `root` at its path in the run, or in `root` itself."""
    assert order.init is not None
    for place in (root.child(*order.init.path.split("/")), root.child(order.init.name)):
        if find(place) is not None:
            return place
    raise UserError(
        f"order {order.name}: begins from expert {order.init.digest[:12]}, and {root} holds no {order.init.path}; "
        "get that folder of the run, too, or pass its place with --init"
    )


def mismatch(order: Order, card: ExpertCard) -> str | None:
    """Why the order's expert cannot begin from an expert with this card; None where it can."""
    for name, same in (
        ("architecture", order.architecture == card.architecture),
        ("latent space", order.latent.same_space(card.latent)),
        ("text space", order.text == card.text),
    ):
        if not same:
            return f"its {name} is not the order's; make it with `atoll convert --order`"
    if process_of(order.objective) != (card.schedule, card.kind) and order.objective.kind is not Kind.VELOCITY:
        return (
            f"it predicts {card.kind} on {card.schedule.name}, the order wants {order.objective.kind} "
            f"on {order.objective.schedule.name}; only velocity can be learned through the bridge"
        )
    return None


def card_for(order: Order, init: ExpertCard | None = None, digest: str | None = None) -> ExpertCard:
    """The card of the expert this order makes, from random weights or from those of the expert with card and digest."""
    process: dict[str, Any] = {"schedule": order.objective.schedule, "kind": order.objective.kind}
    licenses = [order.license]
    if init is not None and digest is not None:
        process = {"schedule": init.schedule, "kind": init.kind, "bridge_limit": init.bridge_limit}
        process["origin"] = init.origin or f"expert {digest[:12]}"
        licenses.append(init.license)
    return ExpertCard(
        architecture=order.architecture,
        latent=order.latent,
        text=order.text,
        cluster=order.cluster,
        images=order.training.images,
        order=order.digest(),
        partition=order.partition,
        license=all_licenses(licenses),
        **process,
    )
