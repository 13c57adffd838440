"""What a student learns from: noisy images, and what the teachers predict there.

A batch is

    x          float32 [B, C, H, W]   x_t on the student's path
    t          float64 [B]            the student's time
    target     float32 [B, C, H, W]   the teacher's prediction, as the kind that the student predicts
    weight     float32 [B]            of the squared error
    ...        the fields of the condition

Teachers predict while a batch is made, all rows of one expert at once, so that a student's step is like any other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from ..data.stream import sample_order
from ..diffusion import (
    Bridge,
    Condition,
    Denoiser,
    Kind,
    Objective,
    Schedule,
    convert,
    tells_only,
    widen,
    x0_gain,
)
from ..mixture.mixture import Experts, Mixture
from ..router.task import ClusteredSamples
from ..training.config import TrainConfig
from ..training.loop import Batch
from ..training.seeds import batch_numbers


class Images(Protocol):
    """The images a student learns on, and their teachers."""

    def __len__(self) -> int: ...

    def pick(self, rows: Tensor, caption: Tensor) -> tuple[Tensor, Condition]:
        """Normalized latents [B, C, H, W] and conditions of some images."""
        ...

    def teacher(self, rows: Tensor) -> Denoiser:
        """Predicts for x_t of these images, on the sampling path."""
        ...

    def loss_weight(self, rows: Tensor, t: Tensor) -> Tensor:
        """Weight of the teacher's prediction for these images at the student's times, float64 [B]."""
        ...


@dataclass(frozen=True, eq=False)
class DataImages:
    """The training images, each with the expert of its own cluster: DDM's way, which asks no router.

    `experts` predict velocities on the sampling path, by cluster; `kinds` is what each was trained to predict.
    """

    clustered: ClusteredSamples
    experts: Experts
    kinds: Sequence[tuple[Schedule, Kind]]
    objective: Objective
    device: torch.device

    @cached_property
    def rows(self) -> Tensor:
        """Of the data, int64 [N]."""
        return self.clustered.rows("train")

    def __len__(self) -> int:
        return len(self.rows)

    def pick(self, rows: Tensor, caption: Tensor) -> tuple[Tensor, Condition]:
        own = self.rows[rows]
        return self.clustered.shards.latents(own), self.clustered.shards.condition(own, caption)

    def clusters(self, rows: Tensor) -> Tensor:
        return self.clustered.clusters[self.rows[rows]]

    def teacher(self, rows: Tensor) -> Denoiser:
        return own_experts(self.experts, self.clusters(rows).to(self.device))

    def loss_weight(self, rows: Tensor, t: Tensor) -> Tensor:
        return loss_weights(self.kinds, self.clusters(rows), self.objective, t)


@dataclass(frozen=True, eq=False)
class GeneratedImages:
    """Images that the model generated, with the whole mixture as the teacher."""

    latents: Tensor
    condition: Condition
    mixture: Denoiser

    def __len__(self) -> int:
        return len(self.latents)

    def pick(self, rows: Tensor, caption: Tensor) -> tuple[Tensor, Condition]:
        return self.latents[rows], self.condition[rows]

    def teacher(self, rows: Tensor) -> Denoiser:
        return self.mixture

    def loss_weight(self, rows: Tensor, t: Tensor) -> Tensor:
        return torch.ones_like(t)


@dataclass
class TeacherBatches:
    """Batches of noisy images with teachers' targets; a pure function of (seed, images seen before)."""

    images: Images
    objective: Objective
    training: TrainConfig
    device: torch.device  # of the teachers
    data_weight: float = 0.0

    def batch(self, seen: int, size: int, part: slice) -> Batch:
        seed = self.training.seed
        rows = sample_order(len(self.images), seed, seen, size)[part]
        shape = self.images.pick(rows[:1], torch.zeros(1))[0].shape[1:]
        numbers = batch_numbers(seed, seen, size, tuple(shape), part)
        x0, condition = self.images.pick(rows, numbers.caption)
        condition = condition.drop(numbers.dropout < self.training.condition_dropout).to(self.device)
        t = self.objective.times(numbers.u)
        here, x0, eps = widen(t, self.device), x0.to(self.device), numbers.eps.to(self.device)
        x, own, weight = self.objective.corrupt(x0, eps, here)
        with torch.no_grad():
            target = teacher_target(self.images.teacher(rows), self.objective, x, here, condition)
        weight = weight.cpu() * self.images.loss_weight(rows, t)
        target = torch.lerp(target.to(own), own, self.data_weight)
        return {"x": x, "t": t, "target": target, "weight": weight.float(), **condition.tensors()}


def own_experts(experts: Experts, clusters: Tensor) -> Mixture:
    """The expert of each row's own cluster int64 [B], as one denoiser: each is run once, on its own rows."""
    return Mixture(experts, lambda x, t, condition: F.one_hot(clusters, len(experts)).to(x.dtype))


def teacher_target(teacher: Denoiser, objective: Objective, x: Tensor, t: Tensor, condition: Condition) -> Tensor:
    """What a teacher predicts for x on the student's path, as the kind that the student predicts."""
    prediction = Bridge(teacher, onto=objective.schedule)(x, t, condition)
    return convert(prediction, objective.kind, objective.schedule, x, t).value


def loss_weights(
    teachers: Sequence[tuple[Schedule, Kind]], clusters: Tensor, objective: Objective, t: Tensor
) -> Tensor:
    """`loss_weight` of the teacher of each row's cluster int64 [B], float64 [B]."""
    weight = torch.ones_like(t)
    for process in set(teachers):
        own = torch.tensor([one == process for one in teachers])[clusters]
        weight[own] = loss_weight(*process, objective, t[own])
    return weight


def loss_weight(schedule: Schedule, kind: Kind, objective: Objective, t: Tensor) -> Tensor:
    """How much the predictions of a teacher of this kind count at the student's times t: w = 1 / g^2, at most 1.

    A kind that holds noise alone gives x0 by dividing by alpha, one that holds x0 alone gives noise by dividing by
    sigma: at one end an error of the teacher is g times as large in what the student learns. g is the `x0_gain` of the
    teacher's kind over that of the student's, at the log-SNR at which the teacher is evaluated. For a velocity on the
    linear path w is (1 - t)^2 for a teacher of noise and t^2 for one of x0; it is 1 for kinds that hold both.
    """
    held = tells_only(kind, schedule)
    if held is None or held is tells_only(objective.kind, objective.schedule):
        return torch.ones_like(t)
    evaluated = schedule.time_at(objective.schedule.log_snr(t))  # within the teacher's range
    there = objective.schedule.time_at(schedule.log_snr(evaluated))
    gain = x0_gain(objective.kind, objective.schedule, there) / x0_gain(held, schedule, evaluated)
    return gain.square().clamp(max=1.0)
