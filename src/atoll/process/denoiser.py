"""The one interface between a trained thing and everything that uses it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from .condition import Condition
from .prediction import Kind, Prediction
from .schedule import Schedule, scaled

GuidanceWeights = Literal["own", "conditional"]  # what a mixture weighs the unconditional half of guidance by


@runtime_checkable
class Denoiser(Protocol):
    """Answers a noisy state: (x [B, ...], t [B], condition) -> Prediction of `kind` on `schedule`."""

    @property
    def schedule(self) -> Schedule: ...
    @property
    def kind(self) -> Kind: ...
    def __call__(self, x: Tensor, t: Tensor, condition: Condition | None) -> Prediction: ...


@runtime_checkable
class GuidedDenoiser(Denoiser, Protocol):
    """A denoiser with its own way to do classifier-free guidance (a mixture, for one)."""

    def guided(self, x: Tensor, t: Tensor, condition: Condition, scale: float) -> Prediction: ...


def guide(conditional: Tensor, unconditional: Tensor, scale: float) -> Tensor:
    """Classifier-free guidance, u + scale (c - u), in float32 or wider.

    Every kind is the same affine function of state and velocity, and this is an affine combination, so it
    gives the same result whatever kind it is applied to.
    """
    dtype = torch.promote_types(conditional.dtype, torch.float32)
    return torch.lerp(unconditional.to(dtype), conditional.to(dtype), scale)


@runtime_checkable
class PerImageDenoiser(Denoiser, Protocol):
    """A denoiser whose answer depends on which image a row is (its seed, its place in the whole call)."""

    def bind(self, rows: slice, seeds: Sequence[int]) -> Denoiser:
        """The denoiser for a batch that holds `rows` of the images of a call, whose seeds are `seeds`."""
        ...


class Conversation(Protocol):
    """Questions about images that need not go in step, answered in the order that suits whoever answers."""

    def ask(self, images: Sequence[int], x: Tensor, t: Tensor, guided: bool) -> None:
        """Ask about some images, in state x [B, ...] at times t float64 [B] on the CPU. None of them waits already."""
        ...

    def answers(self) -> tuple[list[int], Tensor]:
        """The images that are answered now, at least one while any waits, and their velocities [B, ...]."""
        ...


@runtime_checkable
class UnhurriedDenoiser(Denoiser, Protocol):
    """A denoiser that answers some images before others, since not all of its parts are always at hand."""

    def converse(self, seeds: Sequence[int], condition: Condition | None, scale: float, batch: int) -> Conversation:
        """Begin to talk about the images of a call, by their seeds; what is guided is so by `scale`.

        At most `batch` images are computed at once.
        """
        ...


@dataclass(frozen=True)
class NetworkDenoiser:
    """A network with the schedule and kind it was trained for.

    `network(x, time, condition)` returns a tensor shaped like x; `time = time_scale t` is in the unit its time
    embedding wants (999 for a DiT trained on 1000 integer steps, 1 for a SiT). It is fed the state times the
    schedule's `input_scale`; the state outside, the answer and the loss know nothing of that.
    """

    network: Callable[[Tensor, Tensor, Condition | None], Tensor]
    schedule: Schedule
    kind: Kind
    time_scale: float = 1.0

    def __call__(self, x: Tensor, t: Tensor, condition: Condition | None) -> Prediction:
        scale = self.schedule.input_scale(t)
        fed = x if scale is None else scaled(x, scale).to(x.dtype)
        value = self.network(fed, t * self.time_scale, condition)
        if value.shape != x.shape:  # learned variances, for one: they would broadcast or fail far from here
            raise ValueError(f"the network answered {list(value.shape)} to a state of shape {list(x.shape)}")
        return Prediction(self.kind, value)
