"""Start an island from another expert's weights instead of random numbers.

`atoll convert` makes such a start out of a foreign checkpoint. It may have the order's schedule and kind, or still its
own; then it is trained on through the bridge: its answer is turned into a velocity on the order's path and the order's
loss is taken of that, so that the loss begins where the old network was. The expert that comes out keeps the start's
schedule and kind, and its license. An order may name its start itself: an expert of the run that is to be trained on.
Weights are all that is taken over: the optimizer and the average begin anew.
"""

from __future__ import annotations

from pathlib import Path

from ..artifacts import Artifact, Store, UserError, find
from ..process import Kind
from .expert import Expert, ExpertCard, all_licenses, load_expert
from .learning import process_of
from .order import Order


def start_of(order: Order, root: Store, given: str | Path | None) -> Expert | None:
    """What the order's expert grows out of: what is `given`, or else what the order names, below `root`; or nothing."""
    if order.start is None:
        return None if given is None else read_start(given, order)
    place = place_of_start(order, root) if given is None else Store.at(given)
    if Artifact.open(place).digest != order.start.digest:
        raise UserError(
            f"--start {place}: is not expert {order.start.digest[:12]}, which the order is to train on; "
            f"get {order.start.path} of the run"
        )
    return read_start(place, order)


def place_of_start(order: Order, root: Store) -> Store:
    """Where the expert that an order names lies: below `root` at its path in the run, or in `root` itself."""
    assert order.start is not None
    for place in (root.child(*order.start.path.split("/")), root.child(order.start.name)):
        if find(place) is not None:
            return place
    raise UserError(
        f"order {order.name}: trains on expert {order.start.digest[:12]}, and {root} holds no {order.start.path}; "
        "get that folder of the run, too, or say with --start where it lies"
    )


def read_start(place: str | Path | Store, order: Order) -> Expert:
    """Load a start and check that the order's expert can grow out of it."""
    expert = load_expert(place)
    for name, ours, theirs in (
        ("architecture", order.architecture, expert.card.architecture),
        ("latent space", order.latent, expert.card.latent),
        ("text space", order.text, expert.card.text),
    ):
        if ours != theirs:
            raise UserError(f"--start {place}: its {name} is not the order's; make it with `atoll convert --order`")
    card = expert.card
    if process_of(order.objective) != (card.schedule, card.kind) and order.objective.kind is not Kind.VELOCITY:
        raise UserError(
            f"--start {place}: it predicts {card.kind} on {card.schedule.name}, the order wants {order.objective.kind} "
            f"on {order.objective.schedule.name}; only velocity can be learned through the bridge"
        )
    return expert


def card_for(order: Order, start: Expert | None) -> ExpertCard:
    """The card of the expert this order makes."""
    return card_from(order, None, None) if start is None else card_from(order, start.card, start.digest)


def card_from(order: Order, start: ExpertCard | None, digest: str | None) -> ExpertCard:
    """The same, where all that is known of a start is its card and digest."""
    card = ExpertCard(
        architecture=order.architecture,
        schedule=order.objective.schedule,
        kind=order.objective.kind,
        latent=order.latent,
        text=order.text,
        cluster=order.cluster,
        images=order.training.images,
        order=order.digest(),
        partition=order.partition,
        license=order.license,
    )
    if start is None or digest is None:
        return card
    grown = {
        "schedule": start.schedule,
        "kind": start.kind,
        "bridge_limit": start.bridge_limit,
        "origin": start.origin or f"expert {digest[:12]}",
        "license": all_licenses([order.license, start.license]),
    }
    return card.model_copy(update=grown)
