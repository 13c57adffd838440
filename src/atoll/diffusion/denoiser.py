"""The one interface between a trained thing and everything that uses it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from .condition import Condition
from .prediction import Kind, Prediction
from .schedule import Schedule, scaled


@runtime_checkable
class Denoiser(Protocol):
    """A noisy state to a prediction: (x [B, ...], t [B], condition) -> Prediction of `kind` on `schedule`."""

    @property
    def schedule(self) -> Schedule: ...
    @property
    def kind(self) -> Kind: ...
    def __call__(self, x: Tensor, t: Tensor, condition: Condition | None) -> Prediction: ...


@dataclass(frozen=True)
class NetworkDenoiser:
    """A network with the schedule and kind it was trained for.

    `network(x, time, condition)` returns a tensor shaped like x; `time = time_scale t` is in the unit its time
    embedding wants (999 for a DiT trained on 1000 integer steps, 1 for a SiT). Its input is the state times the
    schedule's `input_scale`; outside, state, prediction and loss are as they are.
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
            raise ValueError(f"the network's output is {list(value.shape)} for a state of shape {list(x.shape)}")
        return Prediction(self.kind, value)
