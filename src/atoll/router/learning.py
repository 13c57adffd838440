"""What a router learns from: noisy latents of all clusters, and which cluster each comes from.

The loss is the cross-entropy of the cluster a sample belongs to, given its noisy latent on the reference path
at a uniform time and its condition, sometimes dropped. Its minimiser is the posterior that
makes the mixture exact, with the condition and, thanks to the dropout, without it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..artifacts import Artifact
from ..data.dataset import LatentDataset
from ..data.index import Index
from ..data.stream import sample_order
from ..diffusion import Condition, LinearFlow, fixed_times, mix, widen
from ..models.router import Router
from ..partition.assignment import clusters_of
from ..training.execution import Execution, autocast
from ..training.packing import Batch
from ..training.recipe import Training
from ..training.seeds import batch_numbers, generator

PATH = LinearFlow()  # the reference path


class ClusteredSamples:
    """All of the data with the cluster of every sample, joined by id."""

    def __init__(self, data: Artifact, partition: Artifact) -> None:
        self._index = Index.of(data)
        self.clusters = clusters_of(self._index, partition)
        self.shards = LatentDataset.of(data)
        assert len(self.shards) == len(self._index), "index and shards disagree"

    def rows(self, split: str) -> Tensor:
        return torch.from_numpy(self._index.rows(split))

    def conditions(self, rows: Tensor, read: str) -> Tensor:
        """A number for each of these rows, int64 [n]: the same where that is what a network `read`s of them.

        `read` is an architecture's condition: none, labels, or one of those that are made of captions.
        """
        if read == "none":
            return torch.zeros(len(rows), dtype=torch.int64)
        if read == "labels":
            return self.shards.labels(rows) + 1  # 0: none
        numbers: dict[tuple[str, ...], int] = {}
        captions = self._index.captions_of(rows.numpy())
        return torch.tensor([numbers.setdefault(tuple(own), len(numbers)) for own in captions], dtype=torch.int64)


@dataclass
class RouterLearner:
    """A network that learns to tell the clusters apart; a `Learner` of training/step.py."""

    network: Router
    training: Training
    clustered: ClusteredSamples
    samples: LatentDataset  # the same samples, here or on the device

    def __post_init__(self) -> None:
        self._train_rows = self.clustered.rows("train")

    def draw(self, images: int, batch: int, part: slice) -> Batch:
        """Rows `part` of the batch that follows `images` seen; times are uniform over [0, 1)."""
        seed = self.training.seed
        numbers = batch_numbers(seed, images, batch, self.network.config.trunk.latent, part)
        rows = self._train_rows[sample_order(len(self._train_rows), seed, images, batch)][part]
        drawn = self._noised(rows, numbers.caption, numbers.u)
        dropped = numbers.dropout < self.training.condition_dropout
        dropped = drawn["dropped"] | dropped if "dropped" in drawn else dropped
        return {**drawn, "eps": numbers.eps, "dropped": dropped, "cluster": self.clustered.clusters[rows]}

    def _noised(self, rows: Tensor, which_caption: Tensor, t: Tensor) -> Batch:
        """What a batch of these rows carries, with its times and their coefficients on the reference path."""
        return {
            **self.samples.pick(rows, which_caption),
            "t": t,
            "alpha": PATH.alpha(t).float(),
            "sigma": PATH.sigma(t).float(),
        }

    def loss(self, network: nn.Module, batch: Batch) -> Tensor:
        """Cross-entropy per sample [B]."""
        x, condition = self._state(batch)
        return F.cross_entropy(self._logits(network, x, batch["t"], condition), batch["cluster"], reduction="none")

    def _state(self, batch: Batch) -> tuple[Tensor, Condition]:
        """x_t on the reference path, and the condition."""
        x0, condition = self.samples.fetch(batch)
        return mix(batch["alpha"], batch["sigma"], x0, batch["eps"]), condition

    def _logits(self, network: nn.Module, x: Tensor, t: Tensor, condition: Condition) -> Tensor:
        """float32 [B, K]."""
        logits: Tensor = network(x, t * self.network.config.trunk.time_scale, condition)
        return logits.float()

    def measure(self, execution: Execution) -> dict[str, float]:
        """Nothing while it learns: `accuracy_over_time` tells all at the end."""
        return {}

    @torch.no_grad()
    def accuracy_over_time(self, execution: Execution, count: int) -> dict[str, list[float]]:
        """Share of unseen samples whose likeliest cluster is their own, with and without condition; and the loss."""
        rows = self.clustered.rows("validation")
        device = next(self.network.parameters()).device
        times = fixed_times(count) if len(rows) else torch.zeros(0)
        table: dict[str, list[float]] = {"t": times.tolist(), "accuracy": [], "accuracy_unconditional": [], "loss": []}
        size = execution.micro_batch or self.training.batch
        for step, time in enumerate(times):
            sums = {"accuracy": 0.0, "accuracy_unconditional": 0.0, "loss": 0.0}
            for part, some in enumerate(torch.split(rows, size)):
                numbers = generator(self.training.seed, "accuracy", step, part)
                which_caption = torch.rand(len(some), generator=numbers, dtype=torch.float64)
                t = time.repeat(len(some))
                drawn = self._noised(some, which_caption, t)
                drawn["eps"] = torch.randn(len(some), *self.network.config.trunk.latent, generator=numbers)
                batch = {name: value.to(device) for name, value in drawn.items() if name != "t"}
                batch["t"] = widen(t, device)
                truth = self.clustered.clusters[some].to(device)
                with autocast(execution):
                    x, condition = self._state(batch)
                    given, dropped = (
                        self._logits(self.network, x, batch["t"], c) for c in (condition, condition.null())
                    )
                sums["accuracy"] += given.argmax(1).eq(truth).sum().item()
                sums["accuracy_unconditional"] += dropped.argmax(1).eq(truth).sum().item()
                sums["loss"] += F.cross_entropy(given, truth, reduction="sum").item()
            for name, value in sums.items():
                table[name].append(value / len(rows))
        return table
