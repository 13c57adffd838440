"""One optimizer step: forward, backward, clip, update, average. The host gives orders and asks for nothing back.

A loss or gradient that is not finite makes the update change nothing; the meters count it. The same code runs eagerly
on a CPU, block by compiled block on a GPU, and there, if one process trains alone, as one CUDA graph that is recorded
once and replayed: a host that starts two thousand kernels a step is slower than the card even for large networks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from ..models.float8 import to_float8
from .execution import Execution, autocast
from .packing import Batch
from .recipe import Training
from .state import TrainingState
from .team import Team

EAGER_STEPS = 3  # before a graph is recorded: kernels are compiled and workspaces taken by then
MOST_SHAPES = 64  # that blocks are compiled for in one process


class Learner(Protocol):
    """What is learned. Whatever is random is a pure function of the images seen before."""

    @property
    def network(self) -> nn.Module:
        """The network on its device; its repeated part is in `blocks`, with a switch `recompute`."""
        ...

    def draw(self, images: int, batch: int, part: slice) -> Batch:
        """Rows `part` of the batch of `batch` images that follows `images` seen; tensors, most on the CPU."""
        ...

    def loss(self, network: nn.Module, batch: Batch) -> Tensor:
        """Loss per sample [B] of the network, or what wraps it, on a batch that is on its device."""
        ...

    def measure(self, execution: Execution) -> dict[str, float]:
        """Numbers for the metrics, of the network, which has the averaged weights meanwhile."""
        ...


class Step:
    """`step(batch, images, ...)` trains on a batch of `images` images, of which this process's part is in `batch`."""

    def __init__(
        self, learner: Learner, state: TrainingState, training: Training, execution: Execution, team: Team
    ) -> None:
        self._learner, self._state = learner, state
        self._training, self._execution, self._team = training, execution, team
        arrange(learner.network, execution)
        self._network = team.wrap(learner.network)
        alone = team.size == 1  # an exchange of gradients is no part of a graph
        self._graph = Graph(self._compute, self._forget) if execution.compiling == "graph" and alone else None

    def __call__(self, batch: Batch, images: int, learning_rate: float, ema_rate: float) -> None:
        self._state.set_rates(learning_rate, ema_rate)
        full = images == self._training.batch
        if self._graph is not None and full:
            self._state.before_update()
            self._graph(batch)
        else:
            self._compute(batch, images)

    def _forget(self) -> None:
        """Give back the memory of gradients."""
        self._state.optimizer.zero_grad(set_to_none=True)

    def _compute(self, batch: Batch, images: int | None = None) -> None:
        images = images or self._training.batch
        team = self._team
        rows = len(next(iter(batch.values())))
        parts = micro_batches(rows, self._execution.micro_batch)
        self._forget()
        total = torch.zeros((), device=self._state.rates.device)
        counts = 0.0 if team.idle(images) else 1.0
        for part in parts:
            piece = {name: value[part] for name, value in batch.items()}
            # compiled kernels are for one shape: whatever is left over runs eagerly
            usual = part.stop - part.start == self._usual_rows
            with team.no_exchange(self._network) if part is not parts[-1] else nullcontext(), eager(unless=usual):
                with autocast(self._execution):
                    share = self._learner.loss(self._network, piece).sum() / images * counts
                torch.autograd.backward(share * team.size)  # the team's gradients are averaged, its losses summed
            total += share.detach()
        self._update(team.sum(total))

    @property
    def _usual_rows(self) -> int:
        """Rows of a forward pass, but for what is left over at the end of a batch or of the budget."""
        part = self._team.part(self._training.batch)
        rows: int = part.stop - part.start
        return min(rows, self._execution.micro_batch or self._training.batch)

    def _update(self, loss: Tensor) -> None:
        """Clip, check, update the weights and their average, and count; all of it on the device, without a wait."""
        state, optimizer = self._state, self._state.optimizer
        gradients = [p.grad for p in self._learner.network.parameters() if p.grad is not None]
        norm = get_total_norm(gradients)
        finite = (torch.isfinite(loss) & torch.isfinite(norm)).to(torch.float32)
        clip = self._training.gradient_clip
        optimizer.found_inf = 1.0 - finite
        optimizer.grad_scale = torch.ones_like(norm) if clip is None else (norm / clip).clamp(min=1.0)
        if not capturing(norm):  # recording a graph changes nothing yet
            state.before_update()
            state.updating = True
        learning_rate, ema_rate = state.rates
        optimizer.param_groups[0]["lr"].copy_(learning_rate)  # one tensor, shared by all groups
        optimizer.step()
        state.ema.update(ema_rate * finite)
        state.meters.add(loss, finite)
        state.updating = False


class Graph:
    """A step as one CUDA graph: recorded after a few eager ones, then replayed on new numbers in the same memory."""

    def __init__(self, compute: Callable[[Batch], None], forget: Callable[[], None]) -> None:
        self._compute, self._forget = compute, forget
        self._stream = torch.cuda.Stream()
        self._static: Batch = {}
        self._recorded: torch.cuda.CUDAGraph | None = None
        self._eager_steps = 0

    def __call__(self, batch: Batch) -> None:
        if not self._static:
            self._static = {name: value.clone() for name, value in batch.items()}
        for name, value in batch.items():
            self._static[name].copy_(value)
        if self._recorded is None and self._eager_steps < EAGER_STEPS:
            self._eager_steps += 1
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                self._compute(self._static)
            torch.cuda.current_stream().wait_stream(self._stream)
            return
        if self._recorded is None:
            self._forget()  # a graph has memory of its own, and takes what the eager steps have left
            recorded = torch.cuda.CUDAGraph()
            # other threads (the feed, a checkpoint's copy) go on allocating and copying meanwhile
            with torch.cuda.graph(recorded, stream=self._stream, capture_error_mode="thread_local"):
                self._compute(self._static)
            self._recorded = recorded
        self._recorded.replay()


def capturing(tensor: Tensor) -> bool:
    return tensor.device.type == "cuda" and torch.cuda.is_current_stream_capturing()


@contextmanager
def eager(*, unless: bool = False) -> Iterator[None]:
    """While inside, compiled blocks run as they are written."""
    if unless:
        yield
    else:
        with torch.compiler.set_stance("force_eager"):
            yield


def arrange(network: nn.Module, execution: Execution) -> None:
    """Tell each block how to compute, and whether to be compiled: one by one, since all are alike."""
    blocks = network.blocks
    assert isinstance(blocks, nn.ModuleList)
    if execution.precision == "float8":
        to_float8(network)
    if execution.compiling != "none":
        allow_many_shapes()
    for index, block in enumerate(blocks):
        block.recompute = index < execution.recomputed_blocks  # type: ignore[assignment]
        block._compiled_call_impl = None
        if execution.compiling != "none":
            block.compile(fullgraph=True, dynamic=False)


def allow_many_shapes() -> None:
    """Let the same code be compiled for more than torch's eight shapes: a process may train, or sample with, many."""
    config = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, MOST_SHAPES)


def micro_batches(batch: int, size: int | None) -> list[slice]:
    """A batch cut into forward passes; the optimizer step does not depend on the cut."""
    size = size or batch
    return [slice(start, min(start + size, batch)) for start in range(0, batch, size)]
