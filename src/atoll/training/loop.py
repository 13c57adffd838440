"""The training loop: experts, routers, students and benchmarks all go through `fit`, and nothing else trains.

Read top to bottom. What is learned is the `Learner`'s and the recipe's; how it is computed is the `Execution`'s.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..artifacts import UserError
from ..models.kernel_check import use_kernels
from .checkpoints import Checkpoints, Ledger, save_execution
from .execution import Execution, open_device
from .feed import Feed
from .packing import Batch
from .recipe import Training
from .state import Counts, TrainingState
from .step import EAGER_STEPS, Learner, Step, eager
from .stopping import StopRequested, StopSignal
from .team import Team, gathered

REPORTS = 40  # rows of metrics in a run
MOST_SKIPPED = 5  # steps in a row that were not finite before a run is given up
GLANCE_SECONDS = 0.5
AGREE_EVERY = 8  # steps; several processes stop at the same one, or some would wait for ever


@dataclass(frozen=True)
class Progress:
    """Progress of a training. `loss` and `val_loss` are the newest measured ones, None before the first."""

    images: int
    total: int
    rate: float | None = None  # images per second of this process's team, since it started or went on
    loss: float | None = None
    val_loss: float | None = None
    skipped: int = 0
    note: str | None = None  # something to be said once

    @property
    def seconds_left(self) -> float | None:
        return (self.total - self.images) / self.rate if self.rate else None


@dataclass(frozen=True)
class Fitted:
    """What `fit` leaves: the state at the end of the budget, rows of metrics, and how it was computed last."""

    state: TrainingState
    rows: list[dict[str, Any]]
    execution: Execution
    leads: bool  # False in all but the first of several processes that trained together


Watch = Callable[[Progress], None]
Show = Callable[[int, Execution], None]  # (images seen, how it is computed), while the network has averaged weights


def fit(
    learner: Learner,
    training: Training,
    execution: Execution,
    folder: Path,
    *,
    identity: dict[str, Any],
    whose: str,
    checkpoint_seconds: float | None = None,
    watch: Watch | None = None,
    show: Show | None = None,
) -> Fitted:
    """Train `learner.network` by `training`; its final state, its metrics and how it was computed.

    Work in progress is in `folder`, under `identity`, which must not change; the same call resumes, bit for bit on a
    CPU, after any kind of death. If the first step runs out of memory, the micro-batch is halved; later the run ends
    with one line, and the same call resumes. `show` is called with every row of metrics.
    """
    device = open_device(execution)
    learner.network.to(device)
    watch = watch or (lambda _: None)
    with gathered(device) as team, StopSignal() as stop, Checkpoints(folder, checkpoint_seconds) as checkpoints:
        if team.leads:
            checkpoints.begin(identity, whose)
            save_execution(folder, execution)
        execution = team.told(execution)  # others may have found another amount of free memory
        wrong = use_kernels(learner.network)
        if wrong is not None and team.leads:
            watch(Progress(0, training.images, note=wrong))
        state = TrainingState(learner.network, training, execution)
        ledger = checkpoints.restore(state)
        first = state.images
        run = Run(learner, training, checkpoints, stop, team, watch, show)
        while not completes(run, execution, state, ledger):
            state.optimizer.zero_grad(set_to_none=True)
            free_memory()
            smaller = halved(execution, training)
            if team.size > 1 or state.images > first or state.updating or smaller is None:
                raise UserError(
                    f"out of memory on {device} after {state.images:,} images: run the same command with a smaller "
                    "--memory, --set micro_batch or a smaller network; it resumes from the last checkpoint"
                )
            execution = smaller
            watch(Progress(first, training.images, note=f"out of memory: micro-batch {execution.micro_batch}"))
            save_execution(folder, execution)
        return Fitted(state, ledger.rows, execution, team.leads)


@dataclass(frozen=True)
class Run:
    """What stays the same while this process trains."""

    learner: Learner
    training: Training
    checkpoints: Checkpoints
    stop: StopSignal
    team: Team
    watch: Watch
    show: Show | None


def completes(run: Run, execution: Execution, state: TrainingState, ledger: Ledger) -> bool:
    """Train to the end of the budget; False if memory ran out.

    A function of its own: inside `except` the error's traceback would keep every activation alive.
    """
    try:
        train(run, execution, state, ledger)
    except RuntimeError as error:
        if type(error).__module__.startswith("torch._dynamo"):
            reason = str(error).strip().splitlines()[0]
            raise UserError(f"compiling failed ({reason[:160]}); use --set compiling=none") from error
        if not out_of_memory(error):
            raise
        return False
    return True


def out_of_memory(error: RuntimeError) -> bool:
    """Whether a device had no room: torch has a type for it, its libraries and graphs have words."""
    words = ("out of memory", "ALLOC_FAILED")
    return isinstance(error, torch.OutOfMemoryError) or any(word in str(error) for word in words)


def halved(execution: Execution, training: Training) -> Execution | None:
    """The same with half of the micro-batch; None below one image."""
    half = (execution.micro_batch or training.batch) // 2
    return execution.model_copy(update={"micro_batch": half}) if half else None


def train(run: Run, execution: Execution, state: TrainingState, ledger: Ledger) -> None:
    """From where the state stands to the end of the budget."""
    learner, training, team = run.learner, run.training, run.team
    device = next(learner.network.parameters()).device
    step = Step(learner, state, training, execution, team)
    clock = Clock(state.images)
    seen: Counts | None = None
    val_loss: float | None = next((row["val_loss"] for row in reversed(ledger.rows) if "val_loss" in row), None)

    def drawn(number: int) -> Batch | None:
        images = number * training.batch
        if images >= training.images:
            return None
        size = min(training.batch, training.images - images)
        return learner.draw(images, size, team.drawn_part(size))

    def report() -> None:
        nonlocal seen, val_loss
        measured = {}
        if team.leads:
            with averaged(state):
                measured = learner.measure(execution)
                if run.show is not None:
                    run.show(state.images, execution)
        seen = state.meters.read()
        val_loss = measured.get("val_loss", val_loss)
        ledger.rows.append({"images": state.images, "loss": seen.loss, **measured})
        state.meters.begin_row()

    if report_missing(ledger, state.images, training):
        report()
    if state.images == training.images:
        return
    if team.leads and device.type == "cuda":
        run.checkpoints.prepare(state)
    for number, batch in Feed(drawn, device).stream(state.images // training.batch):
        size = min(training.batch, training.images - number * training.batch)
        learning_rate = training.learning_rate_at(state.images)
        step(batch, size, learning_rate, state.ema.rate(state.images + size, size))
        state.images += size
        asked = run.stop.requested
        stopping = asked if team.size == 1 else number % AGREE_EVERY == 0 and team.any(asked)

        if report_due(state.images, size, training.images):
            report()
        elif device.type == "cpu" or clock.glance_due():  # on a CPU, whether a run ends must not depend on the clock
            seen = state.meters.glance() or seen
        give_up_if_lost(seen, state.images)
        if team.leads:
            loss = None if seen is None else seen.loss
            skipped = 0 if seen is None else seen.skipped
            rate = clock.rate(state.images)
            run.watch(Progress(state.images, training.images, rate, loss, val_loss, skipped))
            run.checkpoints.keep(state, ledger, stopping)
        if stopping:
            team.wait()  # for the first to have written it
            raise StopRequested(f"Interrupted, saved after {state.images:,} images. Run the same command again.")


@contextmanager
def averaged(state: TrainingState) -> Iterator[None]:
    """While inside, the network has the averaged weights, runs eagerly on any shape and keeps no gradients."""
    with state.ema.swapped(), eager(), torch.no_grad():
        yield


def give_up_if_lost(seen: Counts | None, images: int) -> None:
    """End a run whose last steps were all without effect, and say why."""
    if seen is not None and seen.longest_row >= MOST_SKIPPED:
        raise UserError(
            f"the loss or gradient of {seen.longest_row} steps in a row was not finite, after {images:,} images; "
            "nothing was updated by them: lower training.learning_rate, or compute with precision=float32"
        )


def free_memory() -> None:
    """Return unused memory to the device."""
    gc.collect()
    torch.cuda.empty_cache()


def report_missing(ledger: Ledger, images: int, training: Training) -> bool:
    """Whether the row of the last step is not there: memory ran out while it was measured."""
    if images == 0 or (ledger.rows and ledger.rows[-1]["images"] == images):
        return False
    size = images - (images - 1) // training.batch * training.batch
    return report_due(images, size, training.images)


def report_due(images: int, batch: int, total: int, reports: int = REPORTS) -> bool:
    """True when the step that ended at `images` crossed one of `reports` evenly spaced marks."""
    return images == total or images * reports // total > (images - batch) * reports // total


class Clock:
    """Wall time since a run began or went on; its first steps, in which all is compiled and recorded, do not count."""

    def __init__(self, images: int, settle: int = EAGER_STEPS + 1) -> None:
        self._steps, self._settle = 0, settle
        self._start = time.monotonic(), images
        self._glanced = time.monotonic()

    def rate(self, images: int) -> float | None:
        """Images per second."""
        self._steps += 1
        if self._steps == self._settle:
            self._start = time.monotonic(), images
        if self._steps <= self._settle:
            return None
        began, first = self._start
        return (images - first) / max(time.monotonic() - began, 1e-9)

    def glance_due(self) -> bool:
        now = time.monotonic()
        if now - self._glanced < GLANCE_SECONDS:
            return False
        self._glanced = now
        return True
