"""From ensemble.json to something that answers: experts verified, bridged and mixed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..artifacts import Store, UserError
from ..islands.expert import Expert, load_expert
from ..process import Bridge
from ..router.card import TrainedRouter, load_router
from .file import NAME, EnsembleFile, Member, find_ensemble
from .mixture import GuidanceWeights, Mixture
from .routes import Route


@dataclass(frozen=True)
class Ensemble:
    """A loaded ensemble: expert k is the one of cluster k."""

    file: EnsembleFile
    experts: Sequence[Expert]
    router: TrainedRouter

    def mixture(self, route: Route, guidance_weights: GuidanceWeights = "own") -> Mixture:
        bridges: list[Bridge] = [expert.denoiser(self.file.reference) for expert in self.experts]
        return Mixture(bridges, self.router, route, guidance_weights)


def load_ensemble(run: Store, router: str | None = None, device: torch.device | str = "cpu") -> Ensemble:
    """Load a run's ensemble. `router` is the name of another router folder of the run (a blind one, say)."""
    file = find_ensemble(run)
    if file is None:
        raise UserError(f"{run}: holds no {NAME}; check the path, or admit experts with `atoll admit`")
    if empty := file.empty_clusters():
        raise UserError(
            f"{run}: no expert admitted for cluster {', '.join(map(str, empty))}; train and admit them first"
        )
    if router is None and file.router is None:
        raise UserError(f"{run}: the ensemble has no router yet; train one with `atoll router {run}`")
    path = router or (file.router.path if file.router else "")
    trained = load_router(run.child(path), device)
    if router is None and file.router is not None and trained.digest != file.router.digest:
        raise UserError(f"{run}/{path}: is not the router {NAME} names; put the right one back or register it again")
    if trained.card.partition != file.partition:
        raise UserError(f"{run}/{path}: tells the clusters of another partition apart; train a router for this one")
    experts = {member.cluster: load_member(run, file, member, device) for member in file.experts}
    return Ensemble(file, [experts[cluster] for cluster in range(file.clusters)], trained)


def load_member(run: Store, file: EnsembleFile, member: Member, device: torch.device | str) -> Expert:
    expert = load_expert(run.child(*member.path.split("/")), device)
    if expert.digest != member.digest:
        raise UserError(
            f"{run}/{member.path}: is not the expert {NAME} names; put the right one back or admit it again"
        )
    check_spaces(file, expert, f"{run}/{member.path}")
    return expert


def check_spaces(file: EnsembleFile, expert: Expert, where: str) -> None:
    """An expert of another latent or text space cannot answer for this model."""
    if expert.card.latent != file.latent:
        raise UserError(f"{where}: lives in another latent space than the ensemble; train it for this run's data")
    if expert.card.text is not None and expert.card.text != file.text:
        raise UserError(f"{where}: reads another text encoder than the ensemble; train it for this run's data")
