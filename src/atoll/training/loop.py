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
from .checkpoints import Checkpoints, Ledger, save_execution
from .execution import Execution, open_device
from .feed import Feed
from .packing import Batch
from .recipe import Training
from .state import Counts, TrainingState
from .step import EAGER_STEPS, FORGETTING, RATE, Learner, Step, eager
from .stopping import StopRequested, StopSignal
from .team import Team, gathered
from .trust import trusted_kernels

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
Smaller = Callable[[Execution], Execution | None]  # the next execution that needs less memory; None: there is none


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
    smaller: Smaller = lambda _: None,
    doubt: str | None = None,
) -> Fitted:
    """Train `learner.network` by `training`; its final state, its metrics and how it was computed.

    Work in progress is in `folder`, under `identity`, which must not change; the same call goes on from there, bit for
    bit on a CPU, after any kind of death. Out of memory, it goes on with the next `smaller` execution and says so.
    `show` is called with every row of metrics, to look at the network and leave it as it is. `doubt` is what is wrong
    with the fused kernels for other networks that answer meanwhile: nobody uses them then.
    """
    device = open_device(execution)
    learner.network.to(device)
    watch = watch or (lambda _: None)
    with gathered(device) as team, StopSignal() as stop, Checkpoints(folder, checkpoint_seconds) as checkpoints:
        if team.leads:
            checkpoints.begin(identity, whose)
            save_execution(folder, execution)
        execution = team.told(execution)  # others may have found another amount of free memory
        with trusted_kernels(learner, training, execution, doubt) as said:
            if said is not None and team.leads:
                watch(Progress(0, training.images, note=said))
            state = TrainingState(learner.network, training, execution)
            ledger = checkpoints.restore(state)
            session = Session(learner, training, checkpoints, stop, team, watch, show)
            while not finishes(session, execution, state, ledger):
                free_memory()
                if team.size > 1:
                    raise UserError(
                        f"out of memory on {device} after {state.images:,} images: run the same command with a smaller "
                        "--memory or --set micro_batch, and the team goes on from its last checkpoint"
                    )
                less = smaller(execution)
                if less is None:
                    raise UserError(
                        f"out of memory on {device} after {state.images:,} images, and nothing smaller is left to "
                        "try: use a smaller network, another card, or --device cpu"
                    )
                note = f"out of memory; going on with {changes(execution, less)}"
                watch(Progress(state.images, training.images, note=note))
                execution = less
                save_execution(folder, execution)
                held, images = taken_out(state), state.images
                del state
                free_memory()
                state = TrainingState(learner.network, training, execution)
                if held is not None:
                    state.restore(held, images)
                else:
                    ledger = last_saved(checkpoints, state)
        state.average.settle()
        return Fitted(state, ledger.rows, execution, team.leads)


@dataclass(frozen=True)
class Session:
    """What stays the same while a process trains, however it computes."""

    learner: Learner
    training: Training
    checkpoints: Checkpoints
    stop: StopSignal
    team: Team
    watch: Watch
    show: Show | None


def finishes(session: Session, execution: Execution, state: TrainingState, ledger: Ledger) -> bool:
    """Train to the end of the budget; False if memory ran out on the way.

    A function of its own, so that whoever goes on with less is not inside `except`, where the error's traceback keeps
    every activation that was made alive.
    """
    try:
        run(session, execution, state, ledger)
    except RuntimeError as error:
        if type(error).__module__.startswith("torch._dynamo"):
            reason = str(error).strip().splitlines()[0]
            raise UserError(f"compiling failed ({reason[:160]}); use --set compiling=none") from error
        if not out_of_memory(error):
            raise
        return False
    return True


def out_of_memory(error: RuntimeError) -> bool:
    """Whether a device had no room: torch says so in its own type, its libraries and graphs in words."""
    words = ("out of memory", "ALLOC_FAILED")
    return isinstance(error, torch.OutOfMemoryError) or any(word in str(error) for word in words)


def run(session: Session, execution: Execution, state: TrainingState, ledger: Ledger) -> None:
    """From where the state stands to the end of the budget."""
    learner, training, team, stop = session.learner, session.training, session.team, session.stop
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
        batch = learner.draw(images, size, team.drawn_part(size))
        batch[RATE] = torch.tensor(training.learning_rate_at(images))
        batch[FORGETTING] = torch.tensor(state.average.forgetting(images + size, size))
        return batch

    def report() -> None:
        nonlocal seen, val_loss
        measured = {}
        if team.leads:
            with averaged(state):
                measured = learner.measure(execution)
                if session.show is not None:
                    session.show(state.images, execution)
        seen = state.meters.read()
        val_loss = measured.get("val_loss", val_loss)
        ledger.rows.append({"images": state.images, "loss": seen.loss, **measured})
        state.meters.begin_row()

    if report_missing(ledger, state.images, training):
        report()
    if state.images == training.images:
        return
    if team.leads and device.type == "cuda":
        session.checkpoints.prepare(state)
    for number, batch in Feed(drawn, device).stream(state.images // training.batch):
        size = min(training.batch, training.images - number * training.batch)
        step(batch, size)
        state.images += size
        stopping = stop.requested if team.size == 1 else number % AGREE_EVERY == 0 and team.any(stop.requested)

        if report_due(state.images, size, training.images):
            report()
        elif device.type == "cpu" or clock.glance_due():  # on a CPU, whether a run ends must not depend on the clock
            seen = state.meters.glance() or seen
        give_up_if_lost(seen, state.images)
        if team.leads:
            loss = None if seen is None else seen.loss
            skipped = 0 if seen is None else seen.skipped
            rate = clock.rate(state.images)
            session.watch(Progress(state.images, training.images, rate, loss, val_loss, skipped))
            session.checkpoints.keep(state, ledger, stopping)
        if stopping:
            team.wait()  # for the first to have written it
            raise StopRequested(f"Interrupted, saved after {state.images:,} images. Run the same command again.")


@contextmanager
def averaged(state: TrainingState) -> Iterator[None]:
    """While inside, the network has the averaged weights, runs eagerly on any shape and keeps no gradients."""
    with state.average.lent(), eager(), torch.no_grad():
        yield


def give_up_if_lost(seen: Counts | None, images: int) -> None:
    """End a run whose last steps were all without effect, and say why."""
    if seen is not None and seen.longest_row >= MOST_SKIPPED:
        raise UserError(
            f"the loss or gradient of {seen.longest_row} steps in a row was not finite, after {images:,} images; "
            "nothing was updated by them: lower training.learning_rate, or compute with precision=float32"
        )


def taken_out(state: TrainingState) -> dict[str, torch.Tensor] | None:
    """A copy of the state in the host's memory; None if memory ran out in the midst of an update."""
    state.optimizer.zero_grad(set_to_none=True)
    state.average.close()
    return None if state.updating else {name: value.to("cpu", copy=True) for name, value in state.tensors().items()}


def last_saved(checkpoints: Checkpoints, state: TrainingState) -> Ledger:
    """Go back to the last checkpoint, since the weights are neither before nor after a step."""
    checkpoints.finish()
    ledger = checkpoints.restore(state)
    if state.images == 0:
        raise UserError(
            "out of memory in the midst of the first updates, before anything was saved: run the same command again, "
            "it begins anew with what it has just chosen"
        )
    return ledger


def free_memory() -> None:
    """Give back to the device what nobody uses any more."""
    gc.collect()
    torch.cuda.empty_cache()


def changes(old: Execution, new: Execution) -> str:
    """What differs between two executions, for people: `micro_batch 16, moments 8-bit`."""
    before, after = old.model_dump(), new.model_dump()
    return ", ".join(f"{name} {value}" for name, value in after.items() if before[name] != value)


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
