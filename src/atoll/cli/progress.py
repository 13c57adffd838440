"""How far a command is: a bar in a terminal, a plain line a minute elsewhere, curves in TensorBoard if asked for."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext
from typing import Any

from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as Bars

from ..artifacts import UserError
from ..training.loop import Progress as TrainingState
from .tables import console, print_line

FIRST_SECONDS, LINE_SECONDS, SCALAR_SECONDS = 5.0, 60.0, 5.0  # to the first line, to the next, between points of curves
BAR = 6  # least characters of one


def clock(seconds: float) -> str:
    """`0:07`, `12:34`, `1:02:33`."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"


class Display:
    """Shows one task after another: `display("encoding images", done, total)`; the total may be None."""

    def __init__(self, bars: Bars, quiet: bool, writer: Any) -> None:
        self._bars, self._writer, self._written = bars, writer, 0.0
        self._lines = not quiet and not console.is_terminal
        self._what: str | None = None

    def __call__(self, what: str, done: int, total: int | None, *measured: str) -> None:
        if what != self._what:
            self.finish()
            self._what, self._began, self._first, self._due = what, time.monotonic(), done, FIRST_SECONDS
            self._task = self._bars.add_task(what, numbers="")
        self._report(done, total, measured)

    def finish(self) -> None:
        """End the current task. One that took long gets a last line."""
        if self._what is not None:
            self._report(*self._now, finished=True)
        self._what = None

    def _report(self, done: int, total: int | None, measured: tuple[str, ...], finished: bool = False) -> None:
        self._now = done, total, measured
        seconds = time.monotonic() - self._began
        rate = (done - self._first) / max(seconds, 1e-3)  # what was done before a resume makes it no higher
        numbers = [f"took {clock(seconds)}" if finished else clock(seconds)]
        if rate and total and not finished:
            numbers = [f"left {clock((total - done) / rate)}"]
        numbers += [f"{rate:,.0f}/s" if rate >= 10 else f"{rate:.2g}/s"] if rate else []
        numbers += measured
        if self._lines and seconds >= (FIRST_SECONDS if finished else self._due):
            self._due += LINE_SECONDS
            count = [f"{done:,} of {total:,} ({done / total:.0%})"] if total else []
            print_line(f"{self._what}: {'  '.join([*count, *numbers])}")
        room = console.width - len(f"{self._what}  100% ") - BAR
        while len("  ".join(numbers)) > max(0, room):
            numbers.pop()  # the least important is the last
        complete = finished and total is None
        self._bars.update(
            self._task, numbers="  ".join(numbers), completed=1 if complete else done, total=1 if complete else total
        )

    def training(self, what: str = "training") -> Callable[[TrainingState], None]:
        """A watcher for `fit`: prints its notes, shows and records its losses."""

        def watch(now: TrainingState) -> None:
            if now.note is not None:
                return print_line(now.note) if self._lines or console.is_terminal else None
            values = {"loss": now.loss, "val loss": now.val_loss}
            losses = {name: value for name, value in values.items() if value is not None}
            skipped = [f"{now.skipped:,} steps not finite, left out"] if now.skipped else []
            self(what, now.images, now.total, *(f"{name} {value:.3f}" for name, value in losses.items()), *skipped)
            due = time.monotonic() >= self._written + SCALAR_SECONDS or now.images == now.total
            if self._writer is not None and due:
                self._written = time.monotonic()
                for name, value in (losses | {"images per second": now.rate or 0.0}).items():
                    self._writer.add_scalar(name, value, now.images)

        return watch


@contextmanager
def progress(*, quiet: bool = False, tensorboard: str | None = None) -> Iterator[Display]:
    """A display for the time of a block; `quiet` shows nothing."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(24),
        TextColumn("{task.percentage:>3.0f}%  {task.fields[numbers]}"),
    )
    bars = Bars(*columns, console=console, disable=quiet or not console.is_terminal)
    with nullcontext() if tensorboard is None else closing(summary_writer(tensorboard)) as writer, bars:
        display = Display(bars, quiet, writer)
        yield display
        display.finish()


def summary_writer(folder: str) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise UserError(f"--tensorboard {folder}: pip install 'atoll-diffusion[tensorboard]'") from error
    return SummaryWriter(folder)
