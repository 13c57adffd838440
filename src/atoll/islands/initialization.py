"""What an expert's weights begin as: random numbers, or the weights of another expert.

That other expert is a checkpoint that `atoll convert` has made, a network trained on all clusters for a while, or the
expert that an order of the same cluster gave before. It may have the order's schedule and kind, or still its own; then
it is trained through the bridge: its output is converted to a velocity on the order's path, and the order's loss is
taken of that, so that the loss begins where the old network was. The expert that comes out keeps its schedule, kind and
license. Only weights are taken over: the optimizer and the average begin anew.
"""

from __future__ import annotations

from pathlib import Path

from ..artifacts import Artifact, Store, UserError, find
from ..diffusion import Kind
from .expert import Expert, ExpertCard, all_licenses, load_expert
from .learning import process_of
from .order import Order


def init_of(order: Order, root: Store, given: str | Path | None) -> Expert | None:
    """The expert to begin from: the one `given`, or else the one the order names, below `root`; None for random."""
    if order.init is None:
        return None if given is None else read_init(given, order)
    place = place_of_init(order, root) if given is None else Store.at(given)
    if Artifact.open(place).digest != order.init.digest:
        raise UserError(
            f"--init {place}: is not expert {order.init.digest[:12]}, which the order begins from; "
            f"get {order.init.path} of the run"
        )
    return read_init(place, order)


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


def read_init(place: str | Path | Store, order: Order) -> Expert:
    """Load an expert and check that the order's can begin from it."""
    expert = load_expert(place)
    if (reason := mismatch(order, expert.card)) is not None:
        raise UserError(f"--init {place}: {reason}")
    return expert


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


def card_for(order: Order, init: Expert | None) -> ExpertCard:
    """The card of the expert this order makes."""
    return card_from(order, None, None) if init is None else card_from(order, init.card, init.digest)


def card_from(order: Order, init: ExpertCard | None, digest: str | None) -> ExpertCard:
    """The same, where only card and digest of the expert it begins from are known."""
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
    if init is None or digest is None:
        return card
    grown = {
        "schedule": init.schedule,
        "kind": init.kind,
        "bridge_limit": init.bridge_limit,
        "origin": init.origin or f"expert {digest[:12]}",
        "license": all_licenses([order.license, init.license]),
    }
    return card.model_copy(update=grown)
