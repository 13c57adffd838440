"""What a student learns from: noisy images, and what the teachers predict there.

A batch is

    x          float32 [B, C, H, W]   x_t on the student's path
    t          float64 [B]            the student's time
    target     float32 [B, C, H, W]   the teacher's prediction, as the kind that the student predicts, and as far as it
                                      is not trusted the image's own target
    weight     float32 [B]            of the squared error, as the objective has it
    ...        the fields of the condition

Teachers predict while a batch is made, all rows of one expert at once, so that a student's step is like any other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

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
    per_sample,
    tells_only,
    widen,
    x0_gain,
)
from ..mixture.mixture import Experts, Mixture
from ..router.task import ClusteredSamples
from ..training.config import TrainConfig
from ..training.loop import Batch
from ..training.seeds import batch_numbers
from .plan import DistillPlan


@dataclass
class TeacherBatches:
    """Batches of noisy images with teachers' targets; a pure function of (seed, images seen before).

    count     images there are
    pick      normalized latents [B, C, H, W] and conditions of images by number, given which of their captions
    teacher   predicts for x_t of images by number, on the sampling path
    trust     weight of that prediction for images by number at the student's times, float64 [B]
    device    of the teachers
    """

    count: int
    pick: Callable[[Tensor, Tensor], tuple[Tensor, Condition]]
    teacher: Callable[[Tensor], Denoiser]
    trust: Callable[[Tensor, Tensor], Tensor]
    device: torch.device
    objective: Objective
    training: TrainConfig
    data_weight: float = 0.0

    def batch(self, seen: int, size: int, part: slice) -> Batch:
        seed = self.training.seed
        rows = sample_order(self.count, seed, seen, size)[part]
        shape = tuple(self.pick(rows[:1], torch.zeros(1))[0].shape[1:])
        numbers = batch_numbers(seed, seen, size, shape, part)
        x0, condition = self.pick(rows, numbers.caption)
        condition = condition.drop(numbers.dropout < self.training.condition_dropout).to(self.device)
        t = self.objective.times(numbers.u)
        here, x0, eps = widen(t, self.device), x0.to(self.device), numbers.eps.to(self.device)
        x, own, weight = self.objective.corrupt(x0, eps, here)
        with torch.no_grad():
            target = teacher_target(self.teacher(rows), self.objective, x, here, condition)
        # blended, not weighted: a loss weight that depends on the cluster would move the mean over clusters
        own_weight = 1.0 - (1.0 - self.data_weight) * self.trust(rows, t)
        target = torch.lerp(target.to(own), own, per_sample(own_weight, own).to(own))
        return {"x": x, "t": t, "target": target, "weight": weight.float().cpu(), **condition.tensors()}


def data_batches(
    clustered: ClusteredSamples,
    experts: Experts,
    kinds: Sequence[tuple[Schedule, Kind]],
    device: torch.device,
    plan: DistillPlan,
) -> TeacherBatches:
    """Of the training images, each with the expert of its own cluster: DDM's way, which asks no router.

    `experts` predict velocities on the sampling path, by cluster; `kinds` is what each was trained to predict.
    """
    images, samples = clustered.rows("train"), clustered.shards
    clusters = clustered.clusters[images]

    def trust(rows: Tensor, t: Tensor) -> Tensor:
        found = torch.ones_like(t)
        for process in set(kinds):
            own = torch.tensor([one == process for one in kinds])[clusters[rows]]
            found[own] = trust_of(*process, plan.objective, t[own])
        return found

    return TeacherBatches(
        len(images),
        pick=lambda rows, caption: (samples.latents(images[rows]), samples.condition(images[rows], caption)),
        teacher=lambda rows: own_experts(experts, clusters[rows].to(device)),
        trust=trust,
        device=device,
        objective=plan.objective,
        training=plan.training,
        data_weight=plan.data_weight,
    )


def generated_batches(
    latents: Tensor, condition: Condition, mixture: Denoiser, device: torch.device, plan: DistillPlan
) -> TeacherBatches:
    """Of images that the model generated, with the whole mixture as the teacher."""
    return TeacherBatches(
        len(latents),
        pick=lambda rows, caption: (latents[rows], condition[rows]),
        teacher=lambda rows: mixture,
        trust=lambda rows, t: torch.ones_like(t),
        device=device,
        objective=plan.objective,
        training=plan.training,
        data_weight=plan.data_weight,
    )


def own_experts(experts: Experts, clusters: Tensor) -> Mixture:
    """The expert of each row's own cluster int64 [B], as one denoiser: each is run once, on its own rows."""
    return Mixture(experts, lambda x, t, condition: F.one_hot(clusters, len(experts)).to(x.dtype))


def teacher_target(teacher: Denoiser, objective: Objective, x: Tensor, t: Tensor, condition: Condition) -> Tensor:
    """What a teacher predicts for x on the student's path, as the kind that the student predicts."""
    prediction = Bridge(teacher, onto=objective.schedule)(x, t, condition)
    return convert(prediction, objective.kind, objective.schedule, x, t).value


def trust_of(schedule: Schedule, kind: Kind, objective: Objective, t: Tensor) -> Tensor:
    """How much of the target a teacher of this kind has at the student's times t: w = 1 / g^2, at most 1.

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
