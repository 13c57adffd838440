"""Experts as denoisers, wherever their weights are: asked together, each on its own rows and its own stream."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from ..process import Condition, Kind, Prediction, Schedule
from .groups import Group
from .replay import Replayed, plain_types
from .residency import Residency, Slot


@dataclass(frozen=True)
class EngineExpert:
    """One expert of an engine: a velocity denoiser on the reference path."""

    engine: ExpertEngine
    number: int

    @property
    def schedule(self) -> Schedule:
        return self.engine.reference

    @property
    def kind(self) -> Kind:
        return Kind.VELOCITY

    def __call__(self, x: Tensor, t: Tensor, condition: Condition | None) -> Prediction:
        (value,) = self.engine.answers([Group(self.number, None, len(x), x, t, condition)])
        return Prediction(Kind.VELOCITY, value)


@dataclass(frozen=True, eq=False)
class ExpertEngine:
    """The experts of an ensemble on the reference path, asked several at once."""

    residency: Residency
    reference: Schedule

    @property
    def denoisers(self) -> list[EngineExpert]:
        return [EngineExpert(self, number) for number in range(len(self.residency.experts))]

    @property
    def all_there(self) -> bool:
        return self.residency.resident

    def holds(self, number: int) -> bool:
        return self.residency.find(number) is not None

    def prepare(self, number: int, coming: Sequence[int]) -> None:
        slot = self.residency.enter(number)
        self.residency.expect_first_of(coming, busy=slot)

    def answers(self, groups: Sequence[Group]) -> list[Tensor]:
        """Velocities of the groups' rows, float32 or wider. Experts that are there go first; the next comes meanwhile.

        On CUDA the groups run on their slots' streams. What is computed later on the current stream waits for all of
        them, and they for what was computed there before: no tensor is read too early or given back too soon.
        """
        residency = self.residency
        order = sorted(range(len(groups)), key=lambda i: (residency.find(groups[i].expert) is None, -groups[i].count))
        found: dict[int, Tensor] = {}
        used: set[torch.cuda.Stream] = set()
        for place, i in enumerate(order):
            slot = residency.enter(groups[i].expert)
            if not residency.resident:
                residency.expect_first_of([groups[j].expert for j in order[place + 1 :]], busy=slot)
            found[i] = self._answer(slot, groups[i])
            residency.leave(slot)
            if slot.stream is not None:
                used.add(slot.stream)
        for stream in used:
            torch.cuda.current_stream(stream.device).wait_stream(stream)
        return [found[i] for i in range(len(groups))]

    def _answer(self, slot: Slot, group: Group) -> Tensor:
        function = slot.function(self.residency.experts[group.expert], self.reference)
        wide = torch.promote_types(group.x.dtype, torch.float32)
        out = group.x.new_empty(group.count, *group.x.shape[1:], dtype=wide)  # made on the stream that will read it
        if slot.stream is not None:
            slot.stream.wait_stream(torch.cuda.current_stream(slot.device))
        on_its_stream = torch.cuda.stream(slot.stream) if slot.stream is not None else nullcontext()
        with torch.no_grad(), plain_types(slot.device), on_its_stream:
            if isinstance(function, Replayed):
                return function(group.x, group.t, group.condition, group.rows, out)
            x, t, condition = group.gathered()
            condition = None if condition is None else condition.to(slot.device)
            return out.copy_(function(x.to(slot.device), t.to(slot.device), condition))
