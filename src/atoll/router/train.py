"""The router stage: learn p(cluster | x_t, t, condition) by classification, apart from every expert."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from pydantic import BaseModel, ConfigDict, Field

from ..artifacts import Artifact, UserError, canonical_json, only_one, reuse
from ..data.shards import ResidentSamples
from ..data.space import LatentSpace, text_space
from ..models.accounting import account
from ..models.router import Router, RouterConfig
from ..training.checkpoints import saved_execution
from ..training.execution import device_name, open_device
from ..training.loop import Progress, Watch, averaged, fit
from ..training.recipe import Training
from ..training.resources import Resources
from ..training.seeds import seed_from
from .card import KIND, RouterCard, write_router
from .learning import ClusteredSamples, RouterLearner


class RouterPlan(BaseModel):
    """What to train: the network and for how long. A network whose trunk has condition "none" is blind."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    network: RouterConfig
    training: Training
    accuracy_times: int = Field(20, gt=0, description="at how many times the finished router is tested")


def train_router(
    data: Artifact,
    partition: Artifact,
    out: Path,
    plan: RouterPlan,
    *,
    resources: Resources = Resources(),
    checkpoint_seconds: float | None = None,
    watch: Watch | None = None,
) -> Artifact:
    """Train a router for this partition and leave it in `out`; the same call resumes, or finds it done."""
    resources.check()
    if partition.manifest.parents["data"] != data.digest:
        raise UserError(f"{partition.store}: was not made from {data.store}; partition this data, or pass its own run")
    parents = {"data": data.digest, "partition": partition.digest}
    card = RouterCard(
        architecture=plan.network,
        latent=LatentSpace.model_validate(data.config["latent"]),
        text=text_space(data),
        partition=partition.digest,
        images=plan.training.images,
        licence=data.manifest.licence,
    )
    config = {"plan": plan.model_dump(mode="json"), "card": card.model_dump(mode="json")}
    if (done := reuse(out, KIND, config, parents)) is not None:
        return done
    with only_one(out / "state"):
        if (done := reuse(out, KIND, config, parents)) is not None:  # by a process that held the lock until now
            return done
        clustered = ClusteredSamples(data, partition)
        cost = account(plan.network.trunk)
        choice = resources.choose(cost, plan.training, clustered.shards.nbytes(), saved_execution(out / "state"))
        if choice.said is not None and watch is not None:
            watch(Progress(0, plan.training.images, note=f"computing: {choice.said}"))
        device = open_device(choice.execution)
        clustered.shards.text_device = str(device)
        torch.manual_seed(seed_from(plan.training.seed, "weights"))
        learner = RouterLearner(Router(plan.network), plan.training, clustered, clustered.shards)
        if choice.execution.samples == "device":
            learner.samples = ResidentSamples(clustered.shards, device)
        fitted = fit(
            learner,
            plan.training,
            choice.execution,
            out / "state",
            identity=config | {"parents": parents},
            whose="router",
            checkpoint_seconds=checkpoint_seconds,
            watch=watch,
            smaller=choice.smaller,
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
