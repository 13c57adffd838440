"""Routers, and how often one is asked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

from torch import Tensor

from ..process import Condition

CLOSE = 1e-6  # times nearer than that are the same
Router = Callable[[Tensor, Tensor, Condition | None], Tensor]  # (x, t, condition) -> weights [B, K]


@runtime_checkable
class PerImageRouter(Protocol):
    """A router that remembers something of the images it is asked about."""

    def bind(self, rows: slice, seeds: Sequence[int]) -> Router:
        """The router for a batch that holds `rows` of the images of a call, whose seeds are `seeds`."""
        ...


@dataclass(frozen=True, eq=False)
class AskedEvery:
    """A router that is asked at every n-th step of a time grid; in between its last answer about an image stands.

    Step i of the grid is times[i] >= t > times[i + 1], and `router` is asked in steps 0, n, 2n, ...: at every call that
    a solver makes there. So it is a matter of the time alone, and 1/n of the calls are made whatever the solver.

    What is kept belongs to the batch the router is bound to. Its rows are the images of the batch, or those twice
    with the conditional half first; a half that was not asked about before is asked about, whatever the time.
    """

    router: Router
    times: Tensor
    every: int
    _kept: list[Tensor] | None = None  # None: not bound; empty, or the last answer [B or 2B, K]

    def bind(self, rows: slice, seeds: Sequence[int]) -> AskedEvery:
        return replace(self, _kept=[])

    def due(self, t: Tensor) -> Tensor:
        """Whether it is asked at these times: bool [B]."""
        return (self.times.to(t) >= t[:, None] - CLOSE).sum(dim=1).sub(1).remainder(self.every) == 0

    def __call__(self, x: Tensor, t: Tensor, condition: Condition | None) -> Tensor:
        if self._kept is None:
            raise ValueError("a router that keeps its answers must be bound to the batch's images")
        before = self._kept[0][: len(x)] if self._kept and len(self._kept[0]) >= len(x) else None
        due = self.due(t)
        if before is not None and not bool(due.any()):
            return before
        answer = self.router(x, t, condition)
        if before is not None:
            answer = answer.where(due[:, None], before)
        self._kept[:] = [answer]
        return answer
