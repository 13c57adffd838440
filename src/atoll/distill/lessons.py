"""Lessons: noisy states, and what the teachers say to them, in the student's own words.

A lesson is a batch of

    x          float32 [B, C, H, W]   the state on the student's path
    t          float64 [B]            the student's time
    target     float32 [B, C, H, W]   the teacher's answer as the kind that the student predicts, or what is learned
                                      of it and the sample's own target, or the mean of samples like it
    weight     float32 [B]            of the squared error, as the objective has it
    ...        the fields of the condition

The teachers answer while a batch is drawn, all rows of one expert at once, so that a student's step is a step like any
other: it can be cut into micro-batches, compiled, and recorded as a graph.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
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
    Prediction,
    Schedule,
    coefficients,
    convert,
    linear_form,
    per_sample,
    tells_only,
    widen,
    x0_gain,
)
from ..mixture.mixture import Experts, Mixture
from ..router.task import ClusteredSamples
from ..training.config import TrainConfig
from ..training.loop import Batch
from ..training.seeds import batch_numbers, generator
from .plan import TrustIn
from .posterior import Behind


class Lessons(Protocol):
    def draw(self, images: int, batch: int, part: slice) -> Batch:
        """Rows `part` of the lesson that follows `images` seen; a pure function of these."""
        ...


@dataclass(frozen=True, eq=False)
class OwnExperts:
    """The expert of every sample's own cluster, as one denoiser; `experts` are velocities on one path, by cluster."""

    experts: Experts

    def about(self, clusters: Tensor) -> Mixture:
        """For states of samples of these clusters int64 [B]: each expert is run once, on its own rows."""
        return Mixture(self.experts, lambda x, t, condition: F.one_hot(clusters, len(self.experts)).to(x.dtype))


def taught(teacher: Denoiser, objective: Objective, x: Tensor, t: Tensor, condition: Condition | None) -> Tensor:
    """The answer of a teacher on the reference path to a state on the student's, as the kind the student predicts.

    It is the velocity that the ensemble would paint with, whatever path the student is on: an expert that may not be
    asked beyond its limit says the same to all students.
    """
    answer = Bridge(teacher, onto=objective.schedule)(x, t, condition)
    return convert(answer, objective.kind, objective.schedule, x, t).value


def weight_of(schedule: Schedule, kind: Kind, objective: Objective, t: Tensor) -> Tensor:
    """What the answers of a teacher of this process are worth to a student, at its times t: w, float64 [B].

    A kind that tells noise alone says x0 by dividing by alpha, one that tells x0 alone says noise by dividing by sigma:
    at one end an error of the teacher is g times as large in what the student learns, g the `x0_gain` of what the
    teacher tells over that of the student's kind, at the signal-to-noise at which the teacher is asked. w = 1 / g^2, at
    most 1. For a velocity on the linear path that is (1 - t)^2 of a teacher of noise and t^2 of one of x0. A teacher
    that tells both, as velocity and v do, has 1, and so has one of the student's kind.

    Only what a teacher predicts counts, and neither the weights nor the times it was trained with.
    """
    told = tells_only(kind, schedule)
    if told is None or told is tells_only(objective.kind, objective.schedule):
        return torch.ones_like(widen(t))
    asked = schedule.time_at(objective.schedule.log_snr(t))  # within the teacher's band
    there = objective.schedule.time_at(schedule.log_snr(asked))
    return (x0_gain(objective.kind, objective.schedule, there) / x0_gain(told, schedule, asked)).square().clamp(max=1.0)


@dataclass(frozen=True)
class Trust:
    """How far the teachers of a student are heard, by what they predict."""

    objective: Objective  # the student's
    processes: Sequence[tuple[Schedule, Kind]]  # the teachers', by cluster
    rule: TrustIn

    def share(self, clusters: Tensor, t: Tensor) -> Tensor:
        """Of the answers to states of samples of these clusters int64 [B] at the student's times t: float64 [B]."""
        w = torch.ones_like(widen(t))
        for process in set(self.processes):
            its = torch.tensor([each == process for each in self.processes], device=clusters.device)[clusters]
            w[its] = weight_of(*process, self.objective, t[its])
        return heard(w, self.rule)

    def doubted(self) -> list[int]:
        """Clusters whose teachers are not heard as a whole."""
        t = torch.linspace(0, 1, 101, dtype=torch.float64)
        return [k for k, own in enumerate(self.processes) if bool((weight_of(*own, self.objective, t) < 1).any())]


def heard(w: Tensor, rule: TrustIn) -> Tensor:
    """The share of answers that are worth w: all of it; one voice, the sample's own target having 1 - w; or w."""
    if rule == "whole":
        return torch.ones_like(w)
    return w if rule == "data" else 1.0 / (2.0 - w)


def corrected(answer: Tensor, own: Tensor, truth: float, share: Tensor | None = None) -> Tensor:
    """What a student learns of a teacher's answer and the sample's own target: a answer + (1 - a) own, in own's dtype.

    a is (1 - truth), or (1 - truth) share where a teacher is heard for a `share` float [B] of its answer. A teacher is
    wrong in the same way at every sample, the sample's own target only by chance: its mean is right. So a^2 of the
    teacher's squared error reaches the student, and (1 - a)^2 of the noise that `own` has: that of learning from data,
    or less where it is a mean of all samples that may lie there.
    """
    answer = answer.to(own.dtype)
    if share is None:
        return torch.lerp(answer, own, truth) if truth else answer
    return torch.lerp(answer, own, per_sample(1.0 - (1.0 - truth) * share, own).to(own))


@dataclass
class DataLessons:
    """States are noisy training samples, and the expert of a sample's own cluster answers; no router is asked.

    `experts` answer on the reference path. They are asked on `device`, where all samples may be `resident`, too. The
    target has a share `truth` of the sample's own, and what `trust` takes from a teacher's answer. Where samples that
    may lie `behind` a state are known, their mean stands for the sample's own.
    """

    objective: Objective
    training: TrainConfig
    clustered: ClusteredSamples
    experts: OwnExperts
    latent: tuple[int, ...]
    device: torch.device
    truth: float = 0.0
    trust: Trust | None = None
    behind: Behind | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self._rows = self.clustered.rows("train")

    def draw(self, images: int, batch: int, part: slice) -> Batch:
        samples = self.clustered.shards
        seed = self.training.seed
        numbers = batch_numbers(seed, images, batch, self.latent, part)
        rows = self._rows[sample_order(len(self._rows), seed, images, batch)][part]
        x0 = samples.latents(rows).to(self.device)
        condition = samples.condition(rows, numbers.caption).to(self.device)
        dropped = numbers.dropout < self.training.condition_dropout
        condition = condition.drop(dropped.to(self.device))
        t = self.objective.times(numbers.u)
        at = self.objective.at(t).to(dtype=torch.float32)
        here, eps = at.to(self.device), numbers.eps.to(self.device)
        x = here.noisy(x0, eps)
        clusters = self.clustered.clusters[rows]
        teacher = self.experts.about(clusters.to(self.device))
        own = here.target(x0, eps)
        with self._lock, torch.no_grad():  # batches are drawn by several threads, experts are asked by one
            answer = taught(teacher, self.objective, x, widen(t, self.device), condition)
            if self.behind is not None:
                # a sample that has no condition of its own is not one of those whose condition is dropped
                unsure = torch.nonzero(self.behind.may_be_others(clusters, at)).flatten()
                its, who = unsure.to(self.device), (rows[unsure], dropped[unsure])
                own[its] = self.behind.targets(here[its], x0[its], eps[its], *who, samples.latents)
        share = None if self.trust is None else self.trust.share(clusters, t)
        target = corrected(answer, own, self.truth, share)
        return {"x": x, "t": t, "target": target, "weight": at.weight, **condition.tensors()}


@dataclass(frozen=True, eq=False)
class Questions:
    """What an ensemble may be asked to paint: `count` prompts or classes, made conditions when they are drawn."""

    count: int
    condition: Callable[[list[int]], Condition]  # of those with these numbers
    device: torch.device

    def drawn(self, count: int, dropout: float, numbers: torch.Generator) -> Condition:
        """`count` of them at random, some dropped."""
        dropped = torch.rand(count, generator=numbers, dtype=torch.float64) < dropout
        chosen = torch.randint(max(1, self.count), (count,), generator=numbers).tolist()
        if self.count == 0:  # nothing is read, as in the data's own batches
            return Condition(dropped=torch.ones(count, dtype=torch.bool, device=self.device))
        return self.condition(chosen).to(self.device).drop(dropped.to(self.device))


# Trajectories walked at once, unless said otherwise: enough for each expert to have some. Random numbers are drawn for
# so many together, so that another number makes other students.
TRAJECTORIES = 256
KEPT_POOLS = 2  # batches are drawn ahead: some of the next pool when others of this one are not yet drawn


@dataclass(frozen=True, eq=False)
class Walked:
    """Trajectories on the host: lessons [N], shuffled, whose each is [N], and what each was asked for [P]."""

    lessons: Batch
    whose: Tensor
    conditions: Batch

    def rows(self, rows: Tensor) -> Batch:
        own = {name: value[self.whose[rows]] for name, value in self.conditions.items()}
        return {name: value[rows] for name, value in self.lessons.items()} | own


@dataclass
class SampledLessons:
    """States lie on the ensemble's own trajectories from noise to images, and the mixture answers; no data is needed.

    A trajectory is walked by Euler's steps on the reference path, through one time of each of `steps` equal parts of
    the objective's density. The velocity that takes it on is the lesson, so a state costs one answer. States of
    `trajectories` of them are shuffled into a pool on the host, pool p of seed s always the same: of a few, a student
    would have batch after batch of the same images.
    """

    objective: Objective
    training: TrainConfig
    mixture: Mixture
    questions: Questions
    latent: tuple[int, ...]
    steps: int
    trajectories: int
    device: torch.device
    at_once: int = TRAJECTORIES
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _pools: OrderedDict[int, Walked] = field(default_factory=OrderedDict)

    def draw(self, images: int, batch: int, part: slice) -> Batch:
        wanted = torch.arange(images, images + batch)[part]
        size = self.trajectories * self.steps
        pieces = []
        for number in torch.unique(wanted // size).tolist():
            pieces.append(self.pool(number).rows(wanted[wanted // size == number] % size))
        return {name: torch.cat([piece[name] for piece in pieces]) for name in pieces[0]}

    def pool(self, number: int) -> Walked:
        with self._lock:
            if number not in self._pools:
                while len(self._pools) >= KEPT_POOLS:
                    self._pools.popitem(last=False)
                self._pools[number] = self._walked(number)
            return self._pools[number]

    def _walked(self, number: int) -> Walked:
        """The states of so many trajectories and the velocities there, shuffled."""
        numbers = generator(self.training.seed, "shuffled trajectories", number)
        places = torch.randperm(self.trajectories * self.steps, generator=numbers)
        lessons: Batch = {}
        conditions: Batch = {}
        whose = torch.empty_like(places)
        for first in range(0, self.trajectories, self.at_once):
            own = torch.arange(first, min(first + self.at_once, self.trajectories))
            group, asked = self._group(number * self.trajectories + first, len(own))
            here = places[first * self.steps :][: len(own) * self.steps]
            whose[here] = own.repeat(self.steps)
            # each is written where it stays: a pool is all the memory that there is for it
            for name, value in group.items():
                lessons.setdefault(name, value.new_empty(len(places), *value.shape[1:]))[here] = value
            for name, value in asked.items():
                conditions.setdefault(name, value.new_empty(self.trajectories, *value.shape[1:]))[own] = value
        return Walked(lessons, whose, conditions)

    @torch.no_grad()
    def _group(self, start: int, count: int) -> tuple[Batch, Batch]:
        """Lessons of trajectories start .. start + count - 1, all of one place before the next, and conditions."""
        numbers = generator(self.training.seed, "trajectories", start)
        condition = self.questions.drawn(count, self.training.condition_dropout, numbers)
        x = torch.randn(count, *self.latent, generator=numbers).to(self.device)
        seeds = torch.randint(2**62, (count,), generator=numbers).tolist()
        shift = torch.rand(count, generator=numbers, dtype=torch.float64)
        route, path = self.mixture.route, self.mixture.schedule
        parts = torch.arange(self.steps).flip(0)[:, None]  # from noise to data
        own = self.objective.times(((parts + shift) / self.steps).flatten()).view(self.steps, count)
        there = path.time_at(self.objective.schedule.log_snr(own.flatten())).view_as(own)
        times = torch.cat([torch.ones(1, count, dtype=torch.float64), there])
        lessons: list[Batch] = []
        for place, t in enumerate(times):
            here = widen(t, self.device)
            if place == 0 or not getattr(route, "once", False):
                weights = route(self.mixture.routed(x, here, condition), here, seeds)
            velocity = self.mixture.velocity(x, here, condition, weights)
            if place > 0:  # pure noise is where they begin, and no lesson
                lesson = self._lesson(x, t, velocity, own[place - 1])
                lessons.append({name: value.cpu() for name, value in lesson.items()})
            if place < self.steps:
                x = x + per_sample(times[place + 1] - t, x).to(x) * velocity
        asked = {name: value.cpu() for name, value in condition.tensors().items()}
        return {name: torch.cat([lesson[name] for lesson in lessons]) for name in lessons[0]}, asked

    def _lesson(self, x: Tensor, t: Tensor, velocity: Tensor, s: Tensor) -> Batch:
        """A state x at t on the reference path, as the student meets it at its own time s of the same log-SNR.

        The velocity tells x0 and eps, and both the student's state and its target are made of those two.
        """
        path, mine = self.mixture.schedule, self.objective.schedule
        answer = Prediction(Kind.VELOCITY, velocity)
        here, there = widen(t, self.device), widen(s, self.device)
        state = linear_form(answer, path, x, here, (mine.alpha(there), mine.sigma(there)))
        target = linear_form(answer, path, x, here, coefficients(self.objective.kind, mine, there))
        weight = self.objective.weighting(self.objective.kind, mine, s).float()
        return {"x": state.float(), "t": s, "target": target.float(), "weight": weight}
