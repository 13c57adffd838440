"""The training loop: experts, routers, students and benchmarks all go through `fit`, and nothing else trains.

What is learned is in the `Task` and the TrainConfig, how it is computed in the ComputeConfig. A step is

    batch = task.batch(images)                      samples, eps and t, a pure function of (seed, images seen)
    loss = task.loss(network, batch).mean()         objective.corrupt, the network's prediction, its weighted error
    backward; clip; optimizer; average

in micro-batches; eagerly on a CPU, by compiled blocks on a GPU, and there, if one process trains alone, as one CUDA
graph that is recorded once and replayed. A loss or gradient that is not finite changes nothing and is counted.
"""

from __future__ import annotations

import gc
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from ..artifacts import UserError
from ..diffusion import wide_dtype
from ..kernels.float8 import to_float8
from ..models.kernel_check import use_kernels
from . import StopRequested
from .checkpoint import Checkpoints, Counts, Ledger, TrainingState, save_compute
from .compute import ComputeConfig, opened
from .config import TrainConfig
from .distributed import Group, process_group
from .optimizer import guarded_step, set_learning_rate

REPORTS = 40  # rows of metrics in a run
MOST_SKIPPED = 5  # steps in a row that were not finite before a run is given up
READ_SECONDS = 0.5  # between readings of the meters on a GPU, which make the host wait
AGREE_EVERY = 8  # steps; several processes stop at the same one, or some would wait for ever
EAGER_STEPS = 3  # before a graph is recorded: kernels are compiled and workspaces taken by then
AHEAD = 3  # batches drawn before they are needed

Batch = dict[str, Tensor]  # by name; the first dimension is the batch's


class Task(Protocol):
    """What is learned. Whatever is random is a pure function of the images seen before."""

    @property
    def network(self) -> nn.Module:
        """The network; its repeated part is in `blocks`, each with a switch `recompute`."""
        ...

    def batch(self, images: int, size: int, rows: slice) -> Batch:
        """`rows` of the batch of `size` images that follows `images` seen; most tensors on the CPU."""
        ...

    def loss(self, network: nn.Module, batch: Batch) -> Tensor:
        """Loss per sample [B] of the network, or what wraps it, on a batch that is on its device."""
        ...

    def report(self, images: int, compute: ComputeConfig) -> dict[str, float]:
        """Numbers for a row of metrics, of the network, which has its averaged weights meanwhile."""
        ...


@dataclass(frozen=True)
class Progress:
    """Progress of a training. `loss` and `val_loss` are the newest measured ones, None before the first."""

    images: int
    total: int
    rate: float | None = None  # images per second of all processes, since it started or resumed
    loss: float | None = None
    val_loss: float | None = None
    skipped: int = 0
    note: str | None = None  # to be printed once

    @property
    def seconds_left(self) -> float | None:
        return (self.total - self.images) / self.rate if self.rate else None


@dataclass(frozen=True)
class Fitted:
    """What `fit` leaves: the state at the end of the budget, rows of metrics, and how it was computed last."""

    state: TrainingState
    rows: list[dict[str, Any]]
    compute: ComputeConfig
    is_main: bool  # False in all but the first of several processes that trained together


Watch = Callable[[Progress], None]


def fit(
    task: Task,
    training: TrainConfig,
    compute: ComputeConfig,
    folder: Path,
    *,
    identity: dict[str, Any],
    what: str,
    checkpoint_seconds: float | None = None,
    watch: Watch | None = None,
) -> Fitted:
    """Train `task.network` by `training`; its final state, its metrics and how it was computed.

    Work in progress is in `folder`, under `identity` of `what`, which must not change; the same call resumes, bit for
    bit on a CPU, after any kind of death. If the first step runs out of memory, the micro-batch is halved; later the
    run ends with one line.
    """
    watch = watch or (lambda _: None)
    with (
        opened(compute) as device,
        process_group(device) as group,
        StopSignal() as stop,
        Checkpoints(folder, checkpoint_seconds) as checkpoints,
    ):
        task.network.to(device)
        if group.is_main:
            checkpoints.begin(identity, what)
            save_compute(folder, compute)
        compute = group.broadcast(compute)  # other processes may have found another amount of free memory
        if compute.precision == "float8":
            to_float8(task.network)
        if (fault := use_kernels(task.network)) is not None and group.is_main:
            watch(Progress(0, training.images, note=fault))
        state = TrainingState(task.network, training, compute)
        ledger = checkpoints.restore(state)
        run = Run(task, training, checkpoints, stop, group, watch, state.images)
        while not run.completes(compute, state, ledger):
            compute = compute.model_copy(update={"micro_batch": (compute.micro_batch or training.batch) // 2})
            watch(Progress(state.images, training.images, note=f"out of memory: micro-batch {compute.micro_batch}"))
            save_compute(folder, compute)
        return Fitted(state, ledger.rows, compute, group.is_main)


@dataclass(frozen=True)
class Run:
    """What stays the same while this process trains."""

    task: Task
    training: TrainConfig
    checkpoints: Checkpoints
    stop: StopSignal
    group: Group
    watch: Watch
    first: int  # images seen when it began or resumed

    def completes(self, compute: ComputeConfig, state: TrainingState, ledger: Ledger) -> bool:
        """Train to the end of the budget; False if the first step ran out of memory and a smaller one is possible.

        A function of its own: inside `except` the error's traceback would keep every activation alive.
        """
        try:
            self.train(compute, state, ledger)
            return True
        except RuntimeError as error:
            if type(error).__module__.startswith("torch._dynamo"):
                reason = str(error).strip().splitlines()[0]
                raise UserError(f"compiling failed ({reason[:160]}); use --set compile=none") from error
            if not isinstance(error, torch.OutOfMemoryError) and "out of memory" not in str(error):
                raise
            smallest = (compute.micro_batch or self.training.batch) == 1
            if self.group.size > 1 or state.images > self.first or state.updating or smallest:
                raise UserError(
                    f"out of memory on {state.device} after {state.images:,} images: run the same command with a "
                    "smaller --memory, --set micro_batch or a smaller network; it resumes from the last checkpoint"
                ) from error
        state.optimizer.zero_grad(set_to_none=True)
        gc.collect()
        torch.cuda.empty_cache()
        return False

    def train(self, compute: ComputeConfig, state: TrainingState, ledger: Ledger) -> None:
        """From where the state stands to the end of the budget."""
        training, group = self.training, self.group
        step = Step(self.task, state, training, compute, group)
        started: tuple[float, int] | None = None  # when and after how many images the steps run at their usual speed
        read_at, reading_is_free = time.monotonic(), state.device.type == "cpu"  # and no clock decides over such a run
        seen: Counts | None = None
        val_loss = next((row["val_loss"] for row in reversed(ledger.rows) if "val_loss" in row), None)
        for number, batch in enumerate(self.batches(state)):
            size = min(training.batch, training.images - state.images)
            step(batch, size)
            state.images += size
            now, stopping = time.monotonic(), self.stop.requested
            if group.size > 1:
                stopping = number % AGREE_EVERY == 0 and group.any(stopping)
            rate = None if started is None else (state.images - started[1]) / max(now - started[0], 1e-9)
            started = (now, state.images) if number == EAGER_STEPS else started

            if report_due(state.images, size, training.images):
                measured = {}
                if group.is_main:
                    with averaged(state):
                        measured = self.task.report(state.images, compute)
                seen = state.meters.read()
                val_loss = measured.get("val_loss", val_loss)
                ledger.rows.append({"images": state.images, "loss": seen.loss, **measured})
                state.meters.begin_row()
            elif reading_is_free or now >= read_at + READ_SECONDS:
                seen, read_at = state.meters.read(), now
            if seen is not None and seen.longest_row >= MOST_SKIPPED:
                raise UserError(
                    f"the loss or gradient of {seen.longest_row} steps in a row was not finite, after "
                    f"{state.images:,} images; nothing was updated by them: lower training.learning_rate, or compute "
                    "with precision=float32"
                )
            if group.is_main:
                loss, skipped = (None, 0) if seen is None else (seen.loss, seen.skipped)
                self.watch(Progress(state.images, training.images, rate, loss, val_loss, skipped))
                self.checkpoints.keep(state, ledger, stopping)
            if stopping:
                group.wait()  # for the main process to have written it
                raise StopRequested(f"Interrupted, saved after {state.images:,} images. Run the same command again.")

    def batches(self, state: TrainingState) -> Iterator[Batch]:
        """This process's rows of every batch that is left, on the device."""
        size, device = self.training.batch, state.device

        def draw(images: int) -> Batch:
            count = min(size, self.training.images - images)
            return self.task.batch(images, count, self.group.rows(count))

        left = range(state.images, self.training.images, size)
        for batch in prefetched(draw, left, device) if device.type == "cuda" else map(draw, left):
            yield on_device(batch, device)


def on_device(batch: Batch, device: torch.device) -> Batch:
    """Without waiting for pinned tensors, and in types that the device has: Apple's GPUs have no float64."""
    wide = wide_dtype(device)
    return {
        name: value.to(device, wide if value.dtype == torch.float64 else value.dtype, non_blocking=True)
        for name, value in batch.items()
    }


def prefetched(draw: Callable[[int], Batch], numbers: range, device: torch.device) -> Iterator[Batch]:
    """Batches drawn a few ahead by one thread, which also pins their memory; text encoders are not for several."""

    def pinned(number: int) -> Batch:
        return {name: v.pin_memory() if v.device.type == "cpu" else v for name, v in draw(number).items()}

    on_gpu = device.type == "cuda"
    prepare = (lambda: torch.cuda.set_device(device)) if on_gpu else None  # a thread begins on the first GPU
    coming: deque[Future[Batch]] = deque()
    with ThreadPoolExecutor(1, "atoll-batches", initializer=prepare) as thread:
        for number in numbers:
            coming.append(thread.submit(pinned if on_gpu else draw, number))
            if len(coming) > AHEAD:
                yield coming.popleft().result()
        while coming:
            yield coming.popleft().result()


class Step:
    """`step(batch, size)` trains on a batch of `size` images, of which this process's rows are in `batch`."""

    def __init__(
        self, task: Task, state: TrainingState, training: TrainConfig, compute: ComputeConfig, group: Group
    ) -> None:
        self._task, self._state = task, state
        self._training, self._compute, self._group = training, compute, group
        self._ema_rate = torch.zeros((), device=state.device)
        prepare_blocks(task.network, compute)
        self._network = group.wrap(task.network)
        # neither an exchange of gradients nor an optimizer that waits for the host is part of a graph
        recorded = compute.compile == "cuda-graph" and group.size == 1 and compute.moments == "float32"
        self._graph = Graph(self._train) if recorded else None

    def __call__(self, batch: Batch, size: int) -> None:
        state = self._state
        set_learning_rate(state.optimizer, self._training.learning_rate_at(state.images))
        self._ema_rate.fill_(state.ema.rate(state.images + size, size))
        if self._graph is not None and size == self._training.batch:
            self._graph(batch)
        else:
            self._train(batch, size)

    def _train(self, batch: Batch, size: int | None = None) -> None:
        """Gradients of the mean loss over the whole batch, micro-batch after micro-batch, then the update."""
        size = size or self._training.batch
        state, group, compute = self._state, self._group, self._compute
        own_rows = group.rows(self._training.batch)
        usual = min(own_rows.stop - own_rows.start, compute.micro_batch or self._training.batch)
        parts = micro_batches(len(next(iter(batch.values()))), compute.micro_batch)
        state.optimizer.zero_grad(set_to_none=True)
        loss = torch.zeros((), device=state.device)
        for part in parts:
            piece = {name: value[part] for name, value in batch.items()}
            # compiled kernels are for one shape: whatever is left over runs eagerly
            compiled = compute.compile == "none" or part.stop - part.start == usual
            last = nullcontext() if part is parts[-1] else group.no_exchange(self._network)
            with last, nullcontext() if compiled else eager():
                with compute.autocast():
                    share = self._task.loss(self._network, piece).sum() * (0.0 if group.idle(size) else 1.0 / size)
                torch.autograd.backward(share * group.size)  # gradients are averaged over the group, losses summed
            loss += share.detach()
        self._update(group.sum(loss))

    def _update(self, loss: Tensor) -> None:
        """Clip, check, update the weights and their average, and count; on the device, without making the host wait."""
        state, clip = self._state, self._training.gradient_clip
        norm = get_total_norm([p.grad for p in self._task.network.parameters() if p.grad is not None])
        finite = (torch.isfinite(loss) & torch.isfinite(norm)).to(torch.float32)
        scale = torch.ones_like(norm) if clip is None else (norm / clip).clamp(min=1.0)
        state.updating = True
        guarded_step(state.optimizer, scale, finite)
        state.ema.update(self._ema_rate * finite)
        state.meters.add(loss, finite)
        state.updating = False


class Graph:
    """A step as one CUDA graph: recorded after a few eager ones, then replayed on new numbers in the same memory."""

    def __init__(self, train: Callable[[Batch], None]) -> None:
        self._train = train
        self._stream = torch.cuda.Stream()
        self._static: Batch = {}
        self._recorded: torch.cuda.CUDAGraph | None = None
        self._eager_steps = 0

    def __call__(self, batch: Batch) -> None:
        if not self._static:
            self._static = {name: value.clone() for name, value in batch.items()}
        for name, value in batch.items():
            self._static[name].copy_(value)
        if self._eager_steps < EAGER_STEPS:
            self._eager_steps += 1
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                self._train(self._static)
            torch.cuda.current_stream().wait_stream(self._stream)
            return
        if self._recorded is None:
            self._recorded = torch.cuda.CUDAGraph()
            # the threads that draw batches and write checkpoints allocate and copy meanwhile
            with torch.cuda.graph(self._recorded, stream=self._stream, capture_error_mode="thread_local"):
                self._train(self._static)
        self._recorded.replay()


def prepare_blocks(network: nn.Module, compute: ComputeConfig) -> None:
    """Checkpoint the first blocks, and compile each of them: all are alike, so one compilation serves them."""
    assert isinstance(network.blocks, nn.ModuleList)
    for index, block in enumerate(network.blocks):
        block.recompute = index < compute.checkpointed_blocks  # type: ignore[assignment]
        if compute.compile != "none":
            block.compile(fullgraph=True, dynamic=False)


@contextmanager
def averaged(state: TrainingState) -> Iterator[None]:
    """While inside, the network has the averaged weights, runs eagerly on any shape and keeps no gradients."""
    with state.ema.swapped(), eager(), torch.no_grad():
        yield


def eager() -> AbstractContextManager[None]:
    """While inside, compiled blocks run as they are written."""
    stance: AbstractContextManager[None] = torch.compiler.set_stance("force_eager")
    return stance


def micro_batches(batch: int, size: int | None) -> list[slice]:
    """A batch cut into forward passes; the optimizer step does not depend on the cut."""
    size = size or batch
    return [slice(start, min(start + size, batch)) for start in range(0, batch, size)]


def report_due(images: int, batch: int, total: int, reports: int = REPORTS) -> bool:
    """True when the step that ended at `images` crossed one of `reports` evenly spaced marks."""
    return images == total or images * reports // total > (images - batch) * reports // total


class StopSignal:
    """Remembers SIGTERM and SIGINT while a loop in the main thread runs, which polls `requested` at every step."""

    def __init__(self) -> None:
        self.requested = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopSignal:
        if threading.current_thread() is threading.main_thread():  # others neither get signals nor may set handlers
            self._before = {number: signal.signal(number, self._note) for number in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
