"""What a version names, against what lies there: experts, routers, orders."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

from ..artifacts import Reference, Store, UserError, find
from ..islands.expert import ExpertCard
from ..islands.order import Order, read_order
from ..router.card import RouterCard
from .versions import Member, SetAside, Version, place_of


@dataclass(frozen=True)
class Accepted:
    """An order that a version accepts experts for. `generation`: which of the version's orders artifacts it is of."""

    order: Order
    path: str  # in the run
    generation: int


def accepted_orders(run: Store, version: Version) -> dict[str, Accepted]:
    """Every accepted order by its digest, oldest first. What cannot be read, of a newer atoll say, is set aside."""
    found: dict[str, Accepted] = {}
    for generation, reference in enumerate(version.orders):
        try:
            artifact = find(place_of(run, reference))
            if artifact is not None and artifact.digest != reference.digest:
                raise UserError(f"{artifact.store}: is not what the model of {run} names")
        except UserError as error:
            set_aside(error)
            continue
        for name in () if artifact is None else artifact.names():
            assert artifact is not None
            try:
                order, _ = read_order(artifact.file(name))
            except UserError as error:
                set_aside(error)
                continue
            found[order.digest()] = Accepted(order, f"{reference.path}/{name}", generation)
    return found


def set_aside(error: UserError) -> None:
    warnings.warn(SetAside(f"set aside: {error}"), stacklevel=3)


def partition_of(run: Store, orders: Reference) -> str | None:
    """Digest of the partition that some orders are of; None where they cannot be read."""
    try:
        artifact = find(place_of(run, orders))
    except UserError:
        return None
    return None if artifact is None else artifact.manifest.parents.get("partition")


def check_member(run: Store, version: Version, member: Member, card: ExpertCard) -> None:
    """Refuse an expert whose card says other things than the version does."""
    for name, here, there in (("cluster", member.cluster, card.cluster), ("order", member.order, card.order)):
        if here != there:
            raise UserError(f"{run}/{member.path}: is of {name} {there}, the model says {here}; put the right one back")
    if card.partition not in version.partitions:
        raise UserError(f"{run}/{member.path}: was trained for another partition; train one for this run")
    check_spaces(version, card, f"{run}/{member.path}")


def check_router(version: Version, card: RouterCard, where: str) -> None:
    """Refuse a router of other clusters than the model's, or that sees other things than its experts."""
    if card.partition not in version.partitions:
        raise UserError(f"{where}: tells the clusters of another partition apart; train one for this run")
    if card.architecture.clusters != version.clusters:
        counts = f"{card.architecture.clusters} clusters, the model has {version.clusters}"
        raise UserError(f"{where}: is for {counts}; train a router for this run")
    check_spaces(version, card, where)


def check_spaces(version: Version, card: ExpertCard | RouterCard, where: str) -> None:
    """Refuse an expert or router of another latent or text space."""
    if not card.latent.same_space(version.latent):
        raise UserError(f"{where}: lives in another latent space than the ensemble; train it for this run's data")
    if card.text is not None and card.text != version.text:
        raise UserError(f"{where}: reads another text encoder than the ensemble; train it for this run's data")


def objective_of(card: ExpertCard) -> str:
    """For people: what an expert predicts, and on which path."""
    return f"{card.kind} on {card.schedule.name}"
