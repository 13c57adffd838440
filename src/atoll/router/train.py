"""The router stage: learn p(cluster | x_t, t, condition) by classification, apart from every expert.

When a partition has grown with data added later, its clusters mean what they meant: a router for the older one is
trained further, from its weights and for a part of the images.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from ..artifacts import Artifact, Store, UserError, load_if_same
from ..data.space import LatentConfig, text_space
from ..models.router import Router, RouterConfig, build_router
from ..training.artifact import seeded, train_artifact
from ..training.compute import ComputeConfig
from ..training.config import TrainConfig
from ..training.loop import Watch
from ..training.resources import Resources
from .card import KIND, RouterCard, load_router
from .task import ClusteredSamples, RouterTask


class RouterPlan(BaseModel):
    """What to train: the network and for how long. A network whose trunk has condition "none" is blind."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    network: RouterConfig
    training: TrainConfig
    accuracy_times: int = Field(20, gt=0, description="at how many times the finished router is tested")


@dataclass(frozen=True)
class RouterStart:
    """A router whose weights are trained further; `place` may be None where the result is there already."""

    digest: str
    place: Store | None


def train_router(
    data: Artifact,
    partition: Artifact,
    out: Path,
    plan: RouterPlan,
    *,
    start: RouterStart | None = None,
    resources: Resources = Resources(),
    checkpoint_seconds: float | None = None,
    watch: Watch | None = None,
) -> Artifact | None:
    """Train a router for this partition and leave it in `out`; the same call resumes, or finds it done.

    With `start` it begins with that router's weights; the optimizer and the average begin anew. Of several processes
    that train together all but the main one return None.
    """
    resources.check()
    if partition.manifest.parents["data"] != data.digest:
        raise UserError(f"{partition.store}: was not made from {data.store}; partition this data, or pass its own run")
    parents = {"data": data.digest, "partition": partition.digest}
    parents |= {} if start is None else {"start": start.digest}
    card = RouterCard(
        architecture=plan.network,
        latent=LatentConfig.model_validate(data.config["latent"]),
        text=text_space(data),
        partition=partition.digest,
        images=plan.training.images,
        license=data.manifest.license,
    )
    config = {"plan": plan.model_dump(mode="json"), "card": card.model_dump(mode="json")}
    if (done := load_if_same(out, KIND, config, parents)) is not None:
        return done

    def build(compute: ComputeConfig, device: str) -> RouterTask:
        network: Router = seeded(lambda numbers: build_router(plan.network, numbers), plan.training.seed)
        if start is not None:
            take_weights(network, start)
        clustered = ClusteredSamples(data, partition)
        clustered.shards.text_device = device
        return RouterTask(network, card, config, plan.training, clustered, plan.accuracy_times)

    return train_artifact(
        out,
        KIND,
        build,
        architecture=plan.network.trunk,
        training=plan.training,
        identity=config,
        parents=parents,
        what="router",
        resources=resources,
        checkpoint_seconds=checkpoint_seconds,
        watch=watch,
    )


def take_weights(network: Router, start: RouterStart) -> None:
    """Let a network begin where another router of the same architecture ended."""
    if start.place is None:
        raise UserError(f"the router {start.digest[:12]} to train on is not there; put it back, or add --from-scratch")
    old = load_router(start.place)
    if old.digest != start.digest or old.card.architecture != network.config:
        raise UserError(f"{start.place}: is not the router to train on, or of another size; add --from-scratch")
    network.load_state_dict(old.network.state_dict())
