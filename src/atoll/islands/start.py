"""Start an island from another expert's weights instead of random numbers.

`atoll convert` makes such a start out of a foreign checkpoint. It may have the order's schedule and kind, or still its
own; then it is trained on through the bridge: its answer is turned into a velocity on the order's path and the order's
loss is taken of that, so that the loss begins where the old network was. The expert that comes out keeps the start's
schedule and kind, and its licence.
"""

from __future__ import annotations

from pathlib import Path

from ..artifacts import UserError
from ..process import Kind
from .expert import Expert, ExpertCard, load_expert
from .learning import process_of
from .order import Order


def read_start(place: str | Path, order: Order) -> Expert:
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
    if process_of(order) != (card.schedule, card.kind) and order.objective.kind is not Kind.VELOCITY:
        raise UserError(
            f"--start {place}: it predicts {card.kind} on {card.schedule.name}, the order wants {order.objective.kind} "
            f"on {order.objective.schedule.name}; only velocity can be learned through the bridge"
        )
    return expert


def card_for(order: Order, start: Expert | None) -> ExpertCard:
    """The card of the expert this order makes."""
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
        licence=order.licence,
    )
    if start is None:
        return card
    licences = [licence for licence in (order.licence, start.card.licence) if licence]
    grown = {
        "schedule": start.card.schedule,
        "kind": start.card.kind,
        "bridge_limit": start.card.bridge_limit,
        "origin": start.card.origin or f"expert {start.digest[:12]}",
        "licence": " AND ".join(dict.fromkeys(licences)) or None,
    }
    return card.model_copy(update=grown)
