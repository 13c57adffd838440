"""The router stage: learn p(cluster | x_t, t, condition) by classification, apart from every expert.

When a partition has grown with late data, its clusters mean what they meant: a router for the older one is trained on,
from its weights and for a part of the images.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from pydantic import BaseModel, ConfigDict, Field

from ..artifacts import Artifact, Store, UserError, canonical_json, file_lock, load_if_same
from ..data.space import LatentConfig, text_space
from ..models.accounting import account
from ..models.router import Router, RouterConfig
from ..training.checkpoints import saved_execution
from ..training.execution import device_name
from ..training.loop import Progress, Watch, averaged, fit
from ..training.memory import HOST_ACTIVATIONS
from ..training.recipe import Training
from ..training.resources import Resources
from ..training.seeds import seed_from
from .card import KIND, RouterCard, load_router, write_router
from .learning import ClusteredSamples, RouterLearner

ACTIVATIONS = HOST_ACTIVATIONS / 2  # of a micro-batch on a CPU: a router is to take no more memory than an expert


class RouterPlan(BaseModel):
    """What to train: the network and for how long. A network whose trunk has condition "none" is blind."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    network: RouterConfig
    training: Training
    accuracy_times: int = Field(20, gt=0, description="at how many times the finished router is tested")


@dataclass(frozen=True)
class RouterStart:
    """A router whose weights are trained on; `place` may be None where the result is there already."""

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
) -> Artifact:
    """Train a router for this partition and leave it in `out`; the same call resumes, or finds it done.

    With `start` it begins with that router's weights; the optimizer and the average begin anew.
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
    with file_lock(out / "state"):
        if (done := load_if_same(out, KIND, config, parents)) is not None:  # by a process that held the lock until now
            return done
        clustered = ClusteredSamples(data, partition)
        cost = account(plan.network.trunk)
        saved = saved_execution(out / "state")
        choice = resources.choose(cost, plan.training, clustered.shards.nbytes(), saved, ACTIVATIONS)
        if choice.said is not None and watch is not None:
            watch(Progress(0, plan.training.images, note=f"computing: {choice.said}"))
        device = choice.open_device()
        clustered.shards.text_device = str(device)
        torch.manual_seed(seed_from(plan.training.seed, "weights"))
        network = Router(plan.network)
        if start is not None:
            take_weights(network, start)
        learner = RouterLearner(network, plan.training, clustered, clustered.shards)
        if choice.execution.samples == "device":
            learner.samples = clustered.shards.to(device)
        fitted = fit(
            learner,
            plan.training,
            choice.execution,
            out / "state",
            identity=config | {"parents": parents},
            whose="router",
            checkpoint_seconds=checkpoint_seconds,
            watch=watch,
        )
        with averaged(fitted.state):
            table = learner.accuracy_over_time(fitted.execution, plan.accuracy_times)
        extra = {"accuracy.json": canonical_json(table)}
        weights = fitted.state.averaged_weights()
        provenance = {"execution": fitted.execution.model_dump(), "device": device_name(device)}
        artifact = write_router(
            out, weights, card, fitted.rows, extra, config=config, parents=parents, provenance=provenance
        )
        shutil.rmtree(out / "state", ignore_errors=True)
    return artifact


def take_weights(network: Router, start: RouterStart) -> None:
    """Let a network begin where another router of the same architecture ended."""
    if start.place is None:
        raise UserError(f"the router {start.digest[:12]} to train on is not there; put it back, or add --from-scratch")
    old = load_router(start.place)
    if old.digest != start.digest or old.card.architecture != network.config:
        raise UserError(f"{start.place}: is not the router to train on, or of another size; add --from-scratch")
    network.load_state_dict(old.network.state_dict())
