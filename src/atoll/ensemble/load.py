"""From a version of a run's model to something that answers: experts verified, bridged and mixed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from ..artifacts import Reference, Store, UserError
from ..islands.expert import Expert, load_expert
from ..process import Denoiser
from ..router.card import TrainedRouter, load_router
from .checks import Checks
from .missing import MissingExpert, RouterAmong
from .mixture import GuidanceWeights, Mixture
from .routes import Route
from .versions import Version, open_ensemble, place_of


@dataclass(frozen=True)
class Ensemble:
    """A loaded ensemble: the experts that are there, by cluster, and why each `missing` cluster has none."""

    version: Version
    experts: Sequence[Expert]
    router: TrainedRouter
    missing: Mapping[int, str]

    def mixture(self, route: Route, guidance_weights: GuidanceWeights = "own") -> Mixture:
        """All clusters as one denoiser: place k is cluster k's, and nobody's weight goes to a missing one."""
        there, path = iter(self.experts), self.version.reference
        denoisers: list[Denoiser] = [
            MissingExpert(k, path) if k in self.missing else next(there).denoiser(path)
            for k in range(self.version.clusters)
        ]
        router = RouterAmong(self.router, self.missing) if self.missing else self.router
        return Mixture(denoisers, router, route, guidance_weights)

    def model_digest(self) -> str:
        """Of what it paints: an expert that has gone makes the model that never had it."""
        there = [member for member in self.version.serving if member.cluster not in self.missing]
        return self.version.model_copy(update={"experts": tuple(there)}).model_digest()

    def complaint(self) -> str | None:
        """One line about who is missing; None if all are there."""
        if not self.missing:
            return None
        who = "; ".join(f"cluster {cluster} ({why})" for cluster, why in sorted(self.missing.items()))
        return f"painting without the expert of {who}: its weight goes to the other {len(self.experts)}"


def load_ensemble(run: Store, router: str | None = None, device: torch.device | str = "cpu") -> Ensemble:
    """Load a run's ensemble. `router` is the name of another router folder of the run (a blind one, say).

    An expert that is not there, or damaged, is left out; whoever paints is told by `Ensemble.missing`. Another one in
    its place is refused: somebody put it there.
    """
    version = open_ensemble(run)
    checks = Checks(run)
    checks.check(version.model_copy(update={"experts": ()}))
    if router is not None:
        trained = load_router(run.child(router), device)
        checks.check_router(version, trained.card, router)
    elif version.router is not None:
        trained = load_router(place_of(run, version.router), device)
        check_digest(run, version.router, trained.digest)
    else:
        raise UserError(f"{run}: the ensemble has no router yet; train one with `atoll router {run}`")
    experts, missing = [], dict.fromkeys(version.empty_clusters(), "no expert serves it")
    for member in version.serving:
        try:
            expert = load_expert(place_of(run, member), device)
        except UserError as error:
            missing[member.cluster] = str(error)
            continue
        checks.check_member(version, member)
        check_digest(run, member, expert.digest)
        experts.append(expert)
    if not experts:
        first = min(missing)
        raise UserError(
            f"{run}: has no expert to paint with, for none of its {version.clusters} clusters, "
            f"such as cluster {first} ({missing[first]}); train one and `atoll admit` it"
        )
    return Ensemble(version, experts, trained, missing)


def check_digest(run: Store, reference: Reference, found: str) -> None:
    """Refuse what took the place of something between the check of its card and the loading of its weights."""
    if found != reference.digest:
        raise UserError(f"{run}/{reference.path}: is not what the model of this run names; put the right one back")
