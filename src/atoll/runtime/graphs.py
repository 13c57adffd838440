"""A network as CUDA graphs: recorded once for each of a few numbers of rows, then replayed on new numbers.

At small batches a host that starts four hundred kernels is slower than the card. A graph is started at once, but has
fixed shapes and fixed memory: rows are copied into its inputs and the missing ones filled with repeats, whose answers
nobody reads. Weights are memory too: whoever copies another expert's weights there replays that expert.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from ..diffusion import Condition

Function = Callable[[Tensor, Tensor, Condition | None], Tensor]  # (x, t, condition) -> one row of answer for each of x
# numbers of rows there are graphs for; more rows go through in several pieces. Few sizes, so that a row's bits hardly
# depend on its company, and a service records all of them when it starts
SHAPES = (4, 8, 16, 24, 32, 48, 64, 96, 128)


def padded(rows: int, shapes: tuple[int, ...] = SHAPES) -> int:
    """The number of rows a graph is there for: the smallest that is enough."""
    assert 1 <= rows <= shapes[-1], f"{rows} rows do not fit a graph of {shapes[-1]}"
    return shapes[bisect_left(shapes, rows)]


@dataclass(frozen=True, eq=False)
class _Recorded:
    """Inputs and answer of one shape, in memory that stays; `graph` None: nothing is recorded, it is computed."""

    inputs: dict[str, Tensor]
    answer: Tensor | None
    graph: torch.cuda.CUDAGraph | None


class GraphRunner:
    """A function of rows, computed for padded numbers of them, and on a CUDA device replayed as graphs.

    `record` False computes what a graph would, for tests on a CPU. Two that
    share a `pool` of memory must not run at the same time; each waits for nobody by itself.
    """

    def __init__(
        self,
        function: Function,
        device: torch.device,
        *,
        shapes: tuple[int, ...] = SHAPES,
        record: bool | None = None,
        pool: tuple[int, int] | None = None,
    ) -> None:
        self._function, self._device, self._shapes = function, device, shapes
        self._record = device.type == "cuda" if record is None else record
        self._pool = torch.cuda.graph_pool_handle() if self._record and pool is None else pool
        self._kept: dict[object, _Recorded] = {}
        self._orders: dict[tuple[int, int], Tensor] = {}
        self._warm: set[object] = set()

    @property
    def graphs(self) -> int:
        """How many there are."""
        return sum(kept.graph is not None for kept in self._kept.values())

    def __call__(
        self, x: Tensor, t: Tensor, condition: Condition | None, rows: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor:
        """The function of some rows of a batch (None: of all), on the current stream; into `out` if it is given."""
        count = len(x) if rows is None else len(rows)
        given = {"x": x, "t": t, **({} if condition is None else with_dropped(condition).tensors())}
        pieces = []
        for first in range(0, count, self._shapes[-1]):
            last = min(first + self._shapes[-1], count)
            answer = self._run(given, self._places(rows, first, last))[: last - first]
            if out is None:
                pieces.append(answer.clone())  # the next replay writes there again
            else:
                out[first:last].copy_(answer)
        if out is not None:
            return out
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def _places(self, rows: Tensor | None, first: int, last: int) -> Tensor:
        """Rows `first` to `last` of some rows (None: of a whole batch), the last one repeated to fill a shape."""
        key = first, last
        if key not in self._orders:
            count = padded(last - first, self._shapes)
            self._orders[key] = torch.arange(first, first + count, device=self._device).clamp_(max=last - 1)
        order = self._orders[key]
        return order if rows is None else rows.to(self._device)[order]

    def _run(self, given: dict[str, Tensor], places: Tensor) -> Tensor:
        """Copy these rows into the inputs of the graph for so many, and run it."""
        kind = tuple((name, value.dtype, value.shape[1:]) for name, value in given.items())
        key = len(places), kind
        kept = self._kept.get(key)
        if kept is None:
            inputs = {
                name: torch.empty(len(places), *value.shape[1:], dtype=value.dtype, device=self._device)
                for name, value in given.items()
            }
            fill(inputs, given, places)
            kept = self._kept[key] = self._recorded(inputs, kind)
        else:
            fill(kept.inputs, given, places)
        if kept.graph is None:
            return self._compute(kept.inputs)
        kept.graph.replay()
        assert kept.answer is not None
        return kept.answer

    def _compute(self, inputs: dict[str, Tensor]) -> Tensor:
        condition = Condition.of(inputs) if len(inputs) > 2 else None
        with torch.no_grad(), plain_types(self._device):
            return self._function(inputs["x"], inputs["t"], condition)

    def _recorded(self, inputs: dict[str, Tensor], kind: object) -> _Recorded:
        if not self._record:
            return _Recorded(inputs, None, None)
        # recorded on the stream it will run on: cuBLAS keeps its workspace by stream, and two graphs that shared one
        # must not run at the same time. Nothing can be recorded on the default stream.
        running = torch.cuda.current_stream(self._device)
        default = running == torch.cuda.default_stream(self._device)
        stream = recording_stream(self._device) if default else running
        stream.wait_stream(running)
        if kind not in self._warm:  # kernels are compiled and tables made before anything is recorded
            with torch.cuda.stream(stream):
                self._compute(inputs)
            self._warm.add(kind)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream):
            # not torch.cuda.graph(): it waits for the card and empties its cache, for each of a hundred graphs;
            # thread_local: other threads go on reading experts meanwhile
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")  # type: ignore[arg-type]
            try:
                answer = self._compute(inputs)
            finally:
                graph.capture_end()
        running.wait_stream(stream)
        return _Recorded(inputs, answer, graph)


@lru_cache
def recording_stream(device: torch.device) -> torch.cuda.Stream:
    """For what runs on the default stream, one thing at a time."""
    return torch.cuda.Stream(device)


def with_dropped(condition: Condition) -> Condition:
    """With the field that says which rows are unconditional: guided and plain calls then share their graphs."""
    if condition.dropped is not None:
        return condition
    some = next(iter(condition.tensors().values()))
    return condition.drop(torch.zeros(len(condition), dtype=torch.bool, device=some.device))


def fill(inputs: dict[str, Tensor], given: dict[str, Tensor], places: Tensor) -> None:
    for name, value in given.items():
        if value.device == places.device:
            torch.index_select(value, 0, places, out=inputs[name])
        else:  # an expert on another card
            inputs[name].copy_(value[places.to(value.device)], non_blocking=True)


def plain_types(device: torch.device) -> torch.autocast | nullcontext[None]:
    """Every tensor keeps the type it has, whatever a caller has arranged outside."""
    return torch.autocast(device.type, enabled=False) if device.type in ("cpu", "cuda") else nullcontext()
