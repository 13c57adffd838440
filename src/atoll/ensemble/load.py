"""From a version of a run's model to something that answers: experts verified, bridged and mixed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..artifacts import Store, UserError
from ..islands.expert import Expert, load_expert
from ..process import Bridge
from ..router.card import TrainedRouter, load_router
from .checks import Checks
from .mixture import GuidanceWeights, Mixture
from .routes import Route
from .versions import Reference, Version, open_ensemble, place_of


@dataclass(frozen=True)
class Ensemble:
    """A loaded ensemble: expert k is the one of cluster k."""

    version: Version
    experts: Sequence[Expert]
    router: TrainedRouter

    def mixture(self, route: Route, guidance_weights: GuidanceWeights = "own") -> Mixture:
        bridges: list[Bridge] = [expert.denoiser(self.version.reference) for expert in self.experts]
        return Mixture(bridges, self.router, route, guidance_weights)


def load_ensemble(run: Store, router: str | None = None, device: torch.device | str = "cpu") -> Ensemble:
    """Load a run's ensemble. `router` is the name of another router folder of the run (a blind one, say)."""
    version = open_ensemble(run)
    checks = Checks(run)
    checks.check(version)
    if empty := version.empty_clusters():
        raise UserError(
            f"{run}: no expert admitted for cluster {', '.join(map(str, empty))}; train and admit them first"
        )
    if router is not None:
        trained = load_router(run.child(router), device)
        checks.check_router(version, trained.card, router)
    elif version.router is not None:
        trained = load_router(place_of(run, version.router), device)
        check_digest(run, version, version.router, trained.digest)
    else:
        raise UserError(f"{run}: the ensemble has no router yet; train one with `atoll router {run}`")
    experts = []
    for member in version.serving:
        experts.append(load_expert(place_of(run, member), device))
        check_digest(run, version, member, experts[-1].digest)
    return Ensemble(version, experts, trained)


def check_digest(run: Store, version: Version, reference: Reference, found: str) -> None:
    """Refuse what took the place of something between the check of its card and the loading of its weights."""
    if found != reference.digest:
        raise UserError(
            f"{run}/{reference.path}: is not what version {version.version} of the model names; put the right one back"
        )
