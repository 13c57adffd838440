"""From ensemble.json to something that answers: experts verified, bridged and mixed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..artifacts import Store, UserError
from ..islands.expert import Expert
from ..router.card import TrainedRouter, load_router
from .file import NAME, EnsembleFile, Member, find_ensemble
from .mixture import GuidanceWeights, Mixture
from .placing import OpenedExpert, Placed, Placement, open_expert
from .routes import Route
from .weights import Precision


@dataclass(frozen=True)
class Ensemble:
    """A loaded ensemble: expert k is the one of cluster k."""

    file: EnsembleFile
    placed: Placed
    router: TrainedRouter

    @property
    def experts(self) -> Sequence[OpenedExpert]:
        return self.placed.experts

    def mixture(
        self, route: Route, guidance_weights: GuidanceWeights = "own", precision: Precision = "float32"
    ) -> Mixture:
        engine, router = self.placed.engine(precision), self.placed.router(self.router, precision)
        return Mixture(engine.denoisers, router, route, guidance_weights)


def load_ensemble(run: Store, router: str | None = None, placement: Placement = Placement()) -> Ensemble:
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
    trained = load_router(run.child(path), placement.device)
    if router is None and file.router is not None and trained.digest != file.router.digest:
        raise UserError(f"{run}/{path}: is not the router {NAME} names; put the right one back or register it again")
    if trained.card.partition != file.partition:
        raise UserError(f"{run}/{path}: tells the clusters of another partition apart; train a router for this one")
    found = {member.cluster: open_member(run, file, member) for member in file.experts}
    experts = [found[cluster] for cluster in range(file.clusters)]
    placed = Placed(experts, placement, file.reference)
    placed.read()
    return Ensemble(file, placed, trained)


def open_member(run: Store, file: EnsembleFile, member: Member) -> OpenedExpert:
    expert = open_expert(run.child(*member.path.split("/")))
    if expert.digest != member.digest:
        raise UserError(
            f"{run}/{member.path}: is not the expert {NAME} names; put the right one back or admit it again"
        )
    check_spaces(file, expert, f"{run}/{member.path}")
    return expert


def check_spaces(file: EnsembleFile, expert: OpenedExpert | Expert, where: str) -> None:
    """An expert of another latent or text space cannot answer for this model."""
    if expert.card.latent != file.latent:
        raise UserError(f"{where}: lives in another latent space than the ensemble; train it for this run's data")
    if expert.card.text is not None and expert.card.text != file.text:
        raise UserError(f"{where}: reads another text encoder than the ensemble; train it for this run's data")
