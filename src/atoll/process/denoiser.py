"""The one interface between a trained thing and everything that uses it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from .condition import Condition
from .prediction import Kind, Prediction
from .schedule import Schedule


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


@dataclass(frozen=True)
class NetworkDenoiser:
    """A network with the schedule and kind it was trained for.

    `network(x, time, condition)` returns a tensor shaped like x; `time = time_scale t` is in the unit its time
    embedding wants (999 for a DiT trained on 1000 integer steps, 1 for a SiT).
    """

    network: Callable[[Tensor, Tensor, Condition | None], Tensor]
    schedule: Schedule
    kind: Kind
    time_scale: float = 1.0

    def __call__(self, x: Tensor, t: Tensor, condition: Condition | None) -> Prediction:
        return Prediction(self.kind, self.network(x, t * self.time_scale, condition))
