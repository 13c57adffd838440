"""From a version of a run's model to a mixture: experts verified, placed and mixed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from ..artifacts import Reference, Store, UserError
from ..mixture.missing import RouterAmong
from ..mixture.mixture import Mixture, RouterFunction
from ..registry.checks import Checks
from ..registry.signatures import check_signed
from ..registry.versions import Version, open_ensemble, place_of
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

    An expert that is not there, or damaged, is left out; whoever paints is told by `Ensemble.missing`. Another one in
    its place is refused: somebody put it there. Where the run names its organizers, or the caller does, one of them
    must have signed the version.
    """
    version = open_ensemble(run)
    check_signed(run, version, organizers)
    checks = Checks(run)
    checks.check(version.model_copy(update={"experts": ()}))
    if router is not None:
        trained = load_router(run.child(router), placement.device)
        checks.check_router(version, trained.card, router)
    elif version.router is not None:
        trained = load_router(place_of(run, version.router), placement.device)
        check_digest(run, version.router, trained.digest)
    else:
        raise UserError(f"{run}: the ensemble has no router yet; train one with `atoll router {run}`")
    experts: dict[int, OpenedExpert] = {}
    missing = dict.fromkeys(version.empty_clusters(), "no expert serves it")
    for member in version.serving:
        try:
            expert = open_expert(place_of(run, member))
        except UserError as error:
            missing[member.cluster] = str(error)
            continue
        checks.check_member(version, member)
        check_digest(run, member, expert.digest)
        experts[member.cluster] = expert
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


def check_digest(run: Store, reference: Reference, found: str) -> None:
    """Refuse what took the place of something between the check of its card and the loading of its weights."""
    if found != reference.digest:
        raise UserError(f"{run}/{reference.path}: is not what the model of this run names; put the right one back")
