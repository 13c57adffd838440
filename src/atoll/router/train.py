"""The router loop: learn p(cluster | x_t, t, condition) by classification, apart from every expert.

The loss is the cross-entropy of the cluster a sample belongs to, given its noisy latent on the reference path
at a uniform time and its condition, sometimes dropped. Its minimiser is the posterior that
makes the mixture exact, with the condition and, thanks to the dropout, without it.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from ..artifacts import Artifact, UserError, canonical_json, only_one, reuse
from ..data.index import Index
from ..data.shards import ShardSet
from ..data.space import LatentSpace, text_space
from ..data.stream import sample_order
from ..models.router import Router, RouterConfig
from ..partition.assignment import clusters_of
from ..process import Condition, LinearFlow, fixed_times, noisy
from ..training.average import WeightAverage
from ..training.checkpoint import Checkpoints, TrainingState
from ..training.device import autocast, open_device
from ..training.optimizer import adamw
from ..training.plan import Training
from ..training.seeds import generator, seed_from
from ..training.step import micro_batches, report_due, take_step
from ..training.stopping import StopSignal
from .card import KIND, RouterCard, write_router


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
    device: str | None = None,
    checkpoint_seconds: float = 60.0,
    on_progress: Callable[[int, int], None] | None = None,
) -> Artifact:
    """Train a router for this partition and leave it in `out`; the same call resumes, or finds it done."""
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
    where = open_device(device, plan.training)

    samples = ClusteredSamples(data, partition)
    train_rows, test_rows = samples.rows("train"), samples.rows("validation")
    torch.manual_seed(seed_from(plan.training.seed, "weights"))
    network = Router(plan.network).to(where)
    training = plan.training
    state = TrainingState(
        module=network,
        optimizer=adamw(network, training.learning_rate, training.betas, training.weight_decay),
        average=WeightAverage(network, training.ema_images),
    )
    time_scale = plan.network.trunk.time_scale
    with only_one(out / "state"), StopSignal() as stop:
        if (done := reuse(out, KIND, config, parents)) is not None:  # by a process that held the lock until now
            return done
        checkpoints = Checkpoints(out / "state", checkpoint_seconds)
        checkpoints.begin(config | {"parents": parents}, "router")
        ledger = checkpoints.restore(state)

        while state.images < training.images:
            batch = min(training.batch, training.images - state.images)
            rows = train_rows[sample_order(len(train_rows), training.seed, state.images, batch)]
            numbers = generator(training.seed, "batch", state.images)
            x, t, condition = samples.noisy(rows, numbers, training.condition_dropout)
            clusters = samples.clusters[rows]
            loss = 0.0
            for part in micro_batches(batch, training.micro_batch):
                with autocast(where, training):
                    logits = network(x[part].to(where), t[part].to(where) * time_scale, condition[part].to(where))
                share = F.cross_entropy(logits.float(), clusters[part].to(where), reduction="sum") / batch
                share.backward()  # type: ignore[no-untyped-call]
                loss += share.item()
            take_step(state, training, loss, batch)

            ledger.add(loss)
            if report_due(state.images, batch, training.images):
                ledger.report(state.images, {})
            if on_progress is not None:
                on_progress(state.images, training.images)
            checkpoints.keep(state, ledger, stop)

        weights = state.averaged_weights()
        network.load_state_dict(weights)
        table = accuracy_over_time(network.eval(), samples, test_rows, plan)
        extra = {"accuracy.json": canonical_json(table)}
        artifact = write_router(out, weights, card, ledger.rows, extra, config=config, parents=parents)
        shutil.rmtree(out / "state", ignore_errors=True)
    return artifact


class ClusteredSamples:
    """All of the data with the cluster of every sample, joined by id."""

    def __init__(self, data: Artifact, partition: Artifact) -> None:
        self._index = Index.of(data)
        self.clusters = clusters_of(self._index, partition)
        self._shards = ShardSet([data.file(name) for name in data.names("shards/")], text_space(data))
        assert len(self._shards) == len(self._index), "index and shards disagree"

    def rows(self, split: str) -> Tensor:
        return torch.from_numpy(self._index.rows(split))

    def noisy(
        self, rows: Tensor, numbers: torch.Generator, dropout: float, t: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Condition]:
        """x_t on the reference path, t [B] (stratified over [0, 1) unless given) and the condition."""
        batch = len(rows)
        which_caption, strata, dropped = torch.rand(3, batch, generator=numbers, dtype=torch.float64)
        if t is None:
            t = (torch.randperm(batch, generator=numbers) + strata) / batch
        x0 = self._shards.latents(rows)
        x = noisy(LinearFlow(), x0, torch.randn(x0.shape, generator=numbers), t)
        return x, t, self._shards.condition(rows, which_caption).drop(dropped < dropout)


@torch.no_grad()
def accuracy_over_time(
    network: Router, samples: ClusteredSamples, rows: Tensor, plan: RouterPlan
) -> dict[str, list[float]]:
    """Share of unseen samples whose most likely cluster is their own, with and without the condition, and the loss."""
    times = fixed_times(plan.accuracy_times) if len(rows) else torch.zeros(0)
    table: dict[str, list[float]] = {"t": times.tolist(), "accuracy": [], "accuracy_unconditional": [], "loss": []}
    for step, time in enumerate(times):
        sums = {"accuracy": 0.0, "accuracy_unconditional": 0.0, "loss": 0.0}
        for part, some in enumerate(torch.split(rows, plan.training.micro_batch or plan.training.batch)):
            numbers = generator(plan.training.seed, "accuracy", step, part)
            x, t, condition = samples.noisy(some, numbers, 0.0, t=time.repeat(len(some)))
            given, dropped = (logits_for(network, x, t, c, plan) for c in (condition, condition.null()))
            truth = samples.clusters[some].to(given.device)
            sums["accuracy"] += given.argmax(1).eq(truth).sum().item()
            sums["accuracy_unconditional"] += dropped.argmax(1).eq(truth).sum().item()
            sums["loss"] += F.cross_entropy(given, truth, reduction="sum").item()
        for name, value in sums.items():
            table[name].append(value / len(rows))
    return table


def logits_for(network: Router, x: Tensor, t: Tensor, condition: Condition, plan: RouterPlan) -> Tensor:
    device = next(network.parameters()).device
    with autocast(device, plan.training):
        logits: Tensor = network(x.to(device), t.to(device) * plan.network.trunk.time_scale, condition.to(device))
    return logits.float()
