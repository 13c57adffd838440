"""What a router learns from: noisy latents of all clusters, and which cluster each comes from.

The loss is the cross-entropy of the cluster a sample belongs to, given its noisy latent on the sampling path at a
uniform time and its condition, sometimes dropped. Its minimizer is the posterior that makes the mixture exact, with the
condition and, thanks to the dropout, without it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..artifacts import Artifact, canonical_json
from ..data.dataset import LatentDataset
from ..data.index import Index
from ..data.stream import sample_order
from ..diffusion import Condition, LinearFlow, fixed_times, mix, widen
from ..models.router import Router
from ..partition.assignment import clusters_of
from ..training.compute import ComputeConfig
from ..training.config import TrainConfig
from ..training.loop import Batch
from ..training.result import Result
from ..training.seeds import batch_numbers, generator
from .card import RouterCard, router_result

PATH = LinearFlow()  # the sampling path


class ClusteredSamples:
    """All of the data with the cluster of every sample, joined by id."""

    def __init__(self, data: Artifact, partition: Artifact) -> None:
        self._index = Index.of(data)
        self.clusters = clusters_of(self._index, partition)
        self.shards = LatentDataset.of(data)
        assert len(self.shards) == len(self._index), "index and shards disagree"

    def rows(self, split: str) -> Tensor:
        return torch.from_numpy(self._index.rows(split))


@dataclass
class RouterTask:
    """A network that learns to tell the clusters apart: a `Task` of training/loop.py."""

    network: Router
    card: RouterCard
    config: Mapping[str, Any]  # of the manifest
    training: TrainConfig
    clustered: ClusteredSamples
    accuracy_times: int

    def __post_init__(self) -> None:
        self._train_rows = self.clustered.rows("train")

    def batch(self, images: int, size: int, rows: slice) -> Batch:
        """`rows` of the batch that follows `images` seen; times are uniform over [0, 1)."""
        seed = self.training.seed
        numbers = batch_numbers(seed, images, size, self.network.config.trunk.latent, rows)
        chosen = self._train_rows[sample_order(len(self._train_rows), seed, images, size)][rows]
        dropped = numbers.dropout < self.training.condition_dropout
        return self._drawn(chosen, numbers.caption, numbers.u, numbers.eps, dropped)

    def _drawn(self, rows: Tensor, caption: Tensor, t: Tensor, eps: Tensor, dropped: Tensor) -> Batch:
        samples = self.clustered.shards
        condition = samples.condition(rows, caption).drop(dropped)
        cluster = self.clustered.clusters[rows]
        return {"x0": samples.latents(rows), "eps": eps, "t": t, "cluster": cluster, **condition.tensors()}

    def loss(self, network: nn.Module, batch: Batch) -> Tensor:
        """Cross-entropy per sample [B]."""
        return F.cross_entropy(self._logits(network, batch), batch["cluster"], reduction="none")

    def _logits(self, network: nn.Module, batch: Batch, *, null: bool = False) -> Tensor:
        """float32 [B, K] of a batch's noisy states; with `null` for no condition."""
        t, condition, trunk = batch["t"], Condition.of(batch), self.card.architecture.trunk
        x = mix(PATH.alpha(t), PATH.sigma(t), batch["x0"], batch["eps"])
        logits: Tensor = network(x, t * trunk.time_scale, condition.null() if null else condition)
        return logits.float()

    def report(self, images: int, compute: ComputeConfig) -> dict[str, float]:
        """Nothing while it learns: it is tested once, at the end."""
        return {}

    def finish(self, compute: ComputeConfig) -> Result:
        table = self.accuracy_over_time(compute, self.accuracy_times)
        return router_result(self.card, self.config, {"accuracy.json": canonical_json(table)})

    @torch.no_grad()
    def accuracy_over_time(self, compute: ComputeConfig, count: int) -> dict[str, list[float]]:
        """At `count` times the fraction of unseen samples whose likeliest cluster is their own, with and without
        condition; and the loss.
        """
        rows = self.clustered.rows("validation")
        device = next(self.network.parameters()).device
        times = fixed_times(count) if len(rows) else torch.zeros(0)
        table: dict[str, list[float]] = {"t": times.tolist(), "accuracy": [], "accuracy_unconditional": [], "loss": []}
        for step, time in enumerate(times):
            sums = torch.zeros(3, dtype=torch.float64)
            for part, some in enumerate(torch.split(rows, compute.micro_batch or self.training.batch)):
                numbers = generator(self.training.seed, "accuracy", step, part)
                caption = torch.rand(len(some), generator=numbers, dtype=torch.float64)
                eps = torch.randn(len(some), *self.network.config.trunk.latent, generator=numbers)
                kept = torch.zeros(len(some), dtype=torch.bool)
                drawn = self._drawn(some, caption, time.repeat(len(some)), eps, kept)
                batch = {name: (widen(v, device) if name == "t" else v.to(device)) for name, v in drawn.items()}
                with compute.autocast():
                    given, dropped = (self._logits(self.network, batch, null=null) for null in (False, True))
                right = [logits.argmax(1).eq(batch["cluster"]).sum() for logits in (given, dropped)]
                loss = F.cross_entropy(given, batch["cluster"], reduction="sum")
                sums += torch.stack([*right, loss]).to("cpu", torch.float64)
            for name, value in zip(("accuracy", "accuracy_unconditional", "loss"), sums.tolist(), strict=True):
                table[name].append(value / len(rows))
        return table
