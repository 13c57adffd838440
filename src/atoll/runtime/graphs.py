"""Networks on rows of a batch, in padded numbers of rows: each row gets the same bits whatever company it has.

On a CPU rows are padded to a multiple of 4: matrix kernels sum products of one to three rows in another order, and
vector loops end in a scalar tail. On CUDA a network is recorded as graphs for a few numbers of rows, and replayed on
new numbers: at small batches a host that starts four hundred kernels is slower than the GPU. A graph has fixed shapes
and fixed memory. Weights are memory too: whoever copies another expert's weights there replays that expert.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from contextlib import nullcontext
from functools import lru_cache

import torch
from torch import Tensor

from ..diffusion import Condition

Function = Callable[[Tensor, Tensor, Condition | None], Tensor]  # (x, t, condition) -> one row for each of x
MULTIPLE = 4
# numbers of rows there are graphs for; more rows go through in several pieces
SHAPES = (4, 8, 16, 24, 32, 48, 64, 96, 128)
Graph = tuple[dict[str, Tensor], Tensor | None, torch.cuda.CUDAGraph | None]  # inputs, output, graph


class Runner:
    """A function of rows, on a device, computed for padded numbers of rows.

    `graphs`: replayed as CUDA graphs; on a CPU it then computes what they would. Two that share a `pool` of memory
    must not run at the same time.
    """

    def __init__(
        self,
        function: Function,
        device: torch.device,
        graphs: bool,
        shapes: tuple[int, ...] = SHAPES,
        pool: tuple[int, int] | None = None,
    ) -> None:
        self._function, self._device, self._graphs, self._shapes = function, device, graphs, shapes
        self._record = graphs and device.type == "cuda"
        self._pool = torch.cuda.graph_pool_handle() if self._record and pool is None else pool
        self._kept: dict[object, Graph] = {}
        self._warm: set[object] = set()

    def __call__(
        self, x: Tensor, t: Tensor, condition: Condition | None, rows: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor:
        """The function of some rows of a batch (None: of all), on the current stream; into `out` if it is given."""
        count = len(x) if rows is None else len(rows)
        if not self._graphs:
            value = self._compute(*self._moved(*padded(x, t, condition, rows)))[:count]
            return value if out is None else out.copy_(value)
        given = {"x": x, "t": t, **({} if condition is None else with_dropped(condition).tensors())}
        pieces = []
        for first in range(0, count, self._shapes[-1]):
            last = min(first + self._shapes[-1], count)
            size = self._shapes[bisect_left(self._shapes, last - first)]
            places = torch.arange(first, first + size, device=self._device).clamp_(max=last - 1)
            value = self._replay(given, places if rows is None else rows.to(self._device)[places])[: last - first]
            pieces.append(value.clone() if out is None else out[first:last].copy_(value))  # it is overwritten soon
        return out if out is not None else torch.cat(pieces)

    def _moved(self, x: Tensor, t: Tensor, condition: Condition | None) -> tuple[Tensor, Tensor, Condition | None]:
        return x.to(self._device), t.to(self._device), None if condition is None else condition.to(self._device)

    def _compute(self, x: Tensor, t: Tensor, condition: Condition | None) -> Tensor:
        """Every tensor keeps the type it has, whatever autocast a caller has arranged outside."""
        known = self._device.type in ("cpu", "cuda")
        with torch.no_grad(), torch.autocast(self._device.type, enabled=False) if known else nullcontext():
            return self._function(x, t, condition)

    def _replay(self, given: dict[str, Tensor], places: Tensor) -> Tensor:
        """Copy these rows into the inputs of the graph for so many, and run it."""
        kind = tuple((name, value.dtype, value.shape[1:]) for name, value in given.items())
        key = len(places), kind
        if key not in self._kept:
            inputs = {n: v.new_empty(len(places), *v.shape[1:], device=self._device) for n, v in given.items()}
            fill(inputs, given, places)
            self._kept[key] = self._recorded(inputs, kind)
        inputs, output, graph = self._kept[key]
        fill(inputs, given, places)
        if graph is None:
            return self._of(inputs)
        graph.replay()
        assert output is not None
        return output

    def _of(self, inputs: dict[str, Tensor]) -> Tensor:
        return self._compute(inputs["x"], inputs["t"], Condition.of(inputs) if len(inputs) > 2 else None)

    def _recorded(self, inputs: dict[str, Tensor], kind: object) -> Graph:
        if not self._record:
            return inputs, None, None
        # recorded on the stream it will run on: cuBLAS keeps its workspace by stream, and two graphs that shared one
        # must not run at the same time. Nothing can be recorded on the default stream.
        running = torch.cuda.current_stream(self._device)
        default = running == torch.cuda.default_stream(self._device)
        stream = recording_stream(self._device) if default else running
        stream.wait_stream(running)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream):
            if kind not in self._warm:  # kernels are compiled and tables made before anything is recorded
                self._of(inputs)
                self._warm.add(kind)
            # not torch.cuda.graph(): it waits for the GPU and empties its cache, for each of a hundred graphs;
            # thread_local: other threads go on reading experts meanwhile
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")  # type: ignore[arg-type]
            try:
                output = self._of(inputs)
            finally:
                graph.capture_end()
        running.wait_stream(stream)
        return inputs, output, graph


@lru_cache
def recording_stream(device: torch.device) -> torch.cuda.Stream:
    """For what runs on the default stream, one thing at a time."""
    return torch.cuda.Stream(device)


def padded(
    x: Tensor, t: Tensor, condition: Condition | None, rows: Tensor | None
) -> tuple[Tensor, Tensor, Condition | None]:
    """Some rows of a batch (None: all), the last one repeated until their number is a multiple of 4."""
    count = len(x) if rows is None else len(rows)
    if count % MULTIPLE:
        rows = torch.arange(count, device=x.device) if rows is None else rows
        rows = torch.cat([rows, rows[-1:].expand(-count % MULTIPLE)])
    if rows is None:
        return x, t, condition
    return x[rows], t[rows], None if condition is None else condition[rows]


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
        else:  # an expert on another GPU
            inputs[name].copy_(value[places.to(value.device)], non_blocking=True)
