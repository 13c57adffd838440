"""Every field of a version against what it names: before it is written, and when a model is loaded.

What a version names may have been taken away (holdouts are private, disks are small): that is for whoever needs it to
say. But what lies there must be what is named, and the version must say of it what it says of itself.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

from ..artifacts import Artifact, Reference, Store, UserError, find
from ..data.space import LatentConfig, text_space
from ..diffusion import LinearFlow
from ..islands.expert import KIND as EXPERT
from ..islands.expert import ExpertCard, read_expert_card
from ..islands.order import Order, read_order
from ..router.card import KIND as ROUTER
from ..router.card import RouterCard, read_router_card
from .versions import Member, Version, check_reference, place_of


@dataclass
class Checks:
    """Checks versions of one run; what was found right once is not read again."""

    run: Store
    _opened: dict[tuple[Reference, str], Artifact | None] = field(default_factory=dict)
    _orders: dict[str, dict[str, Order]] = field(default_factory=dict)
    _experts: dict[str, ExpertCard] = field(default_factory=dict)
    _routers: dict[str, RouterCard] = field(default_factory=dict)

    def check(self, version: Version, before: Version | None = None) -> None:
        """Raise a UserError that names the first thing that is not as the version says.

        Experts that stand in the version `before` it were checked with that one, and may be damaged by now: they must
        not keep others from being put in their place. One that begins to serve is checked again.
        """
        known = {} if before is None else {member.digest: member for member in before.experts}
        if version.reference != LinearFlow():
            raise self.wrong(version, f"reference path {version.reference.name}: models are sampled on linear-flow")
        self._check_data(version)
        self._check_lineage(version)
        for reference in version.orders:
            orders = self.opened(reference, "orders")
            if orders is not None and orders.manifest.parents.get("partition") not in version.partitions:
                raise self.wrong(version, f"{reference.path} holds orders of another partition")
        for member in version.experts:
            if not is_as_before(member, known.get(member.digest)):
                self.check_member(version, member)
        if version.router is not None and self.opened(version.router, ROUTER) is not None:
            self.check_router(version, self._router_card(version.router), version.router.path)
        if version.monolith is not None and (card := self._expert_card(version.monolith)) is not None:
            self._check_spaces(version, card, version.monolith.path)
            if card.cluster is not None:
                raise self.wrong(version, f"{version.monolith.path} is an expert of cluster {card.cluster}")

    def _check_data(self, version: Version) -> None:
        data = self.opened(version.data, "data")
        if data is None:
            return
        if not LatentConfig.model_validate(data.config["latent"]).same_space(version.latent):
            raise self.wrong(version, f"latent: is not the latent space of {version.data.path}")
        if text_space(data) != version.text:
            raise self.wrong(version, f"text: is not the text space of {version.data.path}")

    def _check_lineage(self, version: Version) -> None:
        partition = self.opened(version.partition, "partition")
        if partition is not None:
            if partition.manifest.parents.get("data") != version.data.digest:
                raise self.wrong(version, f"{version.partition.path} was not made from {version.data.path}")
            if partition.config["clusters"] != version.clusters:
                found = partition.config["clusters"]
                raise self.wrong(version, f"clusters: {version.clusters}, but {version.partition.path} has {found}")
        chain = [*version.earlier, version.partition]
        for older, newer in pairwise(chain):
            artifact = self.opened(newer, "partition")
            if artifact is not None and artifact.manifest.parents.get("partition") != older.digest:
                raise self.wrong(version, f"{newer.path} did not grow from {older.path}")

    def check_member(self, version: Version, member: Member) -> None:
        """An expert against its card, and its card against the order it was trained for."""
        card = self._expert_card(member)
        if card is None:
            return
        said = {
            "cluster": (member.cluster, card.cluster),
            "order": (member.order, card.order),
            "objective": (member.objective, objective_of(card)),
            "license": (member.license, card.license),
        }
        for name, (here, there) in said.items():
            if here != there:
                raise self.wrong(
                    version, f"{name} of expert {member.name}: {short(here)}, its card says {short(there)}"
                )
        if card.partition not in version.partitions:
            raise self.wrong(version, f"expert {member.name} was trained for another partition")
        self._check_spaces(version, card, member.path)
        order = self.orders_of(version).get(member.order)
        if order is not None and order.cluster != member.cluster:
            raise self.wrong(version, f"expert {member.name}: its order is for cluster {order.cluster}")

    def check_router(self, version: Version, card: RouterCard, path: str) -> None:
        """Whether a router tells this model's clusters apart, and sees what its experts see."""
        if card.partition not in version.partitions:
            raise UserError(f"{self.run}/{path}: tells the clusters of another partition apart; train one for this run")
        if card.architecture.clusters != version.clusters:
            raise UserError(
                f"{self.run}/{path}: tells {card.architecture.clusters} clusters apart, the model has "
                f"{version.clusters}; train a router for this run"
            )
        self._check_spaces(version, card, path)

    def _check_spaces(self, version: Version, card: ExpertCard | RouterCard, path: str) -> None:
        check_spaces(version, card, f"{self.run}/{path}")

    def orders_of(self, version: Version) -> dict[str, Order]:
        """Every order that is accepted, by its digest."""
        found: dict[str, Order] = {}
        for reference in version.orders:
            if reference.digest not in self._orders:
                artifact = self.opened(reference, "orders")
                orders = [] if artifact is None else [read_order(artifact.file(name))[0] for name in artifact.names()]
                self._orders[reference.digest] = {order.digest(): order for order in orders}
            found |= self._orders[reference.digest]
        return found

    def generations(self, version: Version) -> dict[str, int]:
        """Which of the version's orders artifacts each accepted order is of, by the order's digest: 0 for the first."""
        self.orders_of(version)
        return {order: n for n, reference in enumerate(version.orders) for order in self._orders[reference.digest]}

    def opened(self, reference: Reference, kind: str) -> Artifact | None:
        """What a version names, checked to be that; None where nothing lies."""
        key = (Reference(path=reference.path, digest=reference.digest), kind)
        if key not in self._opened:
            artifact = find(place_of(self.run, reference))
            if artifact is not None:
                check_reference(self.run, reference, artifact, kind)
            self._opened[key] = artifact
        return self._opened[key]

    def _expert_card(self, reference: Reference) -> ExpertCard | None:
        artifact = self.opened(reference, EXPERT)
        if artifact is None:
            return None
        if reference.digest not in self._experts:
            self._experts[reference.digest] = read_expert_card(artifact)
        return self._experts[reference.digest]

    def _router_card(self, reference: Reference) -> RouterCard:
        if reference.digest not in self._routers:
            artifact = self.opened(reference, ROUTER)
            assert artifact is not None
            self._routers[reference.digest] = read_router_card(artifact)
        return self._routers[reference.digest]

    def wrong(self, version: Version, what: str) -> UserError:
        return UserError(
            f"{self.run}: version {version.version} of its model does not fit what it names: {what}; "
            f"go back to one that does with `atoll ensemble {self.run} --rollback`"
        )


def is_as_before(member: Member, before: Member | None) -> bool:
    """Whether a version says of an expert what an older one did, but for its errors and that it serves no more."""
    changed = {"serving", "val_loss"}
    return (
        before is not None
        and member.model_dump(exclude=changed) == before.model_dump(exclude=changed)
        and (before.serving or not member.serving)
    )


def check_spaces(version: Version, card: ExpertCard | RouterCard, where: str) -> None:
    """An expert or router of another latent or text space cannot answer for this model."""
    if not card.latent.same_space(version.latent):
        raise UserError(f"{where}: lives in another latent space than the ensemble; train it for this run's data")
    if card.text is not None and card.text != version.text:
        raise UserError(f"{where}: reads another text encoder than the ensemble; train it for this run's data")


def objective_of(card: ExpertCard) -> str:
    """For people: what an expert predicts, and on which path."""
    return f"{card.kind} on {card.schedule.name}"


def short(value: object) -> str:
    text = ascii(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
