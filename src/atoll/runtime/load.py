"""From a version of a run's model to a mixture: experts verified, placed and mixed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from ..artifacts import Store, UserError
from ..mixture.missing import RouterAmong
from ..mixture.mixture import Mixture, RouterFunction
from ..registry.checks import check_member, check_router
from ..registry.signatures import check_signed
from ..registry.versions import Member, Version, open_ensemble, place_of
from ..router.card import TrainedRouter, load_router
from ..sampling import Route
from .placing import OpenedExpert, Placed, Placement, open_expert
from .residency import UnreadableExperts
from .weights import Precision


@dataclass(frozen=True)
class Ensemble:
    """A loaded ensemble: the experts that are there, by cluster, and why each `missing` cluster has none."""

    version: Version
    placed: Placed
    router: TrainedRouter
    missing: Mapping[int, str]

    @property
    def experts(self) -> Sequence[OpenedExpert]:
        return self.placed.experts

    def mixture(self, route: Route, precision: Precision = "float32") -> Mixture:
        """All clusters as one denoiser: column k is cluster k's, and missing experts get no weight."""
        present = [k for k in range(self.version.clusters) if k not in self.missing]
        router: RouterFunction = self.placed.router(self.router, precision)
        if self.missing:
            router = RouterAmong(router, torch.tensor([k in present for k in range(self.version.clusters)]))
        return Mixture(self.placed.pool(precision, self.version.clusters, present), router, route)

    def model_digest(self) -> str:
        """Of what it paints: an expert that has gone makes the model that never had it."""
        there = [member for member in self.version.serving if member.cluster not in self.missing]
        return self.version.model_copy(update={"experts": tuple(there)}).model_digest()

    def complaint(self) -> str | None:
        """One line about who is missing; None if all are there."""
        if not self.missing:
            return None
        who = "; ".join(f"cluster {cluster} ({why})" for cluster, why in sorted(self.missing.items()))
        return f"sampling without the expert of {who}: the other {len(self.experts)} are weighted up"


def load_ensemble(
    run: Store, router: str | None = None, placement: Placement = Placement(), organizers: bytes | None = None
) -> Ensemble:
    """Load a run's ensemble. `router` is the name of another router folder of the run (a blind one, say).

    An expert that is not there, damaged, or another one than the version names is left out; `Ensemble.missing` says so.
    Where the run names its organizers, or the caller does, one of them must have signed the version.
    """
    version = open_ensemble(run)
    check_signed(run, version, organizers)
    if router is not None:
        place = run.child(router)
    elif version.router is not None:
        place = place_of(run, version.router)
    else:
        raise UserError(f"{run}: the ensemble has no router yet; train one with `atoll router {run}`")
    trained = load_router(place, placement.device)
    if router is None and version.router is not None and trained.digest != version.router.digest:
        raise UserError(f"{place}: is not the router that the model names; put the right one back")
    check_router(version, trained.card, str(place))
    placement = placement.with_codecs(version.latent, version.text)
    experts: dict[int, OpenedExpert] = {}
    missing = dict.fromkeys(version.empty_clusters(), "no expert serves it")
    for member in version.serving:
        try:
            experts[member.cluster] = open_member(run, version, member)
        except UserError as error:
            missing[member.cluster] = str(error)
    while experts:
        placed = Placed(list(experts.values()), placement)
        try:
            placed.read()
        except UnreadableExperts as error:
            clusters = list(experts)
            for number, reason in error.reasons.items():
                missing[clusters[number]] = str(reason)
                del experts[clusters[number]]
            continue
        return Ensemble(version, placed, trained, missing)
    first = min(missing)
    raise UserError(
        f"{run}: has no expert, for none of its {version.clusters} clusters, "
        f"such as cluster {first} ({missing[first]}); train one and `atoll admit` it"
    )


def open_member(run: Store, version: Version, member: Member) -> OpenedExpert:
    """An expert that a version names, checked against its card; its weights are read later."""
    expert = open_expert(place_of(run, member))
    if expert.digest != member.digest:
        raise UserError(f"{run}/{member.path}: is not the expert that the model names; put the right one back")
    check_member(run, version, member, expert.card)
    return expert
