"""How far a command is: a bar in a terminal, a plain line a minute elsewhere, curves in TensorBoard if asked for."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, ProgressColumn, Task, TextColumn
from rich.progress import Progress as Bars
from rich.table import Column
from rich.text import Text

from ..artifacts import UserError
from ..training.loop import Progress as TrainingState

console = Console()
FIRST_SECONDS, LINE_SECONDS, SCALAR_SECONDS = 5.0, 60.0, 5.0  # to the first line, to the next, between points of curves
NARROWEST_BAR = 6  # characters


def print_line(text: str) -> None:
    """Print text as it is; a line in a log is never broken."""
    console.print(text, markup=False, highlight=False, soft_wrap=not console.is_terminal)


def clock(seconds: float) -> str:
    """`0:07`, `12:34`, `1:02:33`."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"


def numbers(task: Task) -> list[str]:
    """`left 1:02:33`, `312/s`, `loss 0.431`, `val loss 0.395`: those that are known, the most important first.

    The rate counts from the first report of a task: what was done before a resume makes it no higher.
    """
    seconds = task.finished_time or task.elapsed or 0.0
    rate = (task.completed - task.fields["first"]) / max(seconds, 1e-3)
    time_of = f"took {clock(seconds)}" if task.finished else clock(seconds)
    if not task.finished and rate and task.remaining is not None:
        time_of = f"left {clock(task.remaining / rate)}"
    speed = [] if not rate else [f"{rate:,.0f}/s" if rate >= 10 else f"{rate:.2g}/s"]
    return [time_of, *speed, *task.fields["measured"]]


class Numbers(ProgressColumn):
    """As many of a task's numbers, from the first, as leave room for a bar."""

    def render(self, task: Task) -> Text:
        parts = numbers(task)
        while len("  ".join(parts)) > max(0, console.width - len(f"{task.description}  100% ") - NARROWEST_BAR):
            parts.pop()
        return Text("  ".join(parts))


class Display:
    """Shows one task after another: `display("encoding images", done, total)`; the total may be None."""

    def __init__(self, bars: Bars, quiet: bool, writer: Any) -> None:
        self._bars, self._quiet, self._writer, self._written = bars, quiet, writer, 0.0
        self._tasks: dict[str, Task] = {}
        self._now: Task | None = None
        self._lock = threading.Lock()

    def __call__(self, what: str, done: int, total: int | None, *measured: str) -> None:
        with self._lock:
            if what not in self._tasks:
                self.finish()
                self._bars.add_task(what, total=total, completed=done, first=done, due=FIRST_SECONDS, measured=measured)
                self._tasks[what] = self._bars.tasks[-1]
            self._now = self._tasks[what]
            self._bars.update(self._now.id, completed=done, total=total, measured=measured, of=total)

    def finish(self) -> None:
        """End the current task, which is complete if its total is not known. One that had lines gets a last one."""
        if (task := self._now) is not None:
            if task.total is None:
                nothing = not task.completed
                self._bars.update(task.id, total=task.completed + nothing, advance=nothing, first=nothing)
            if task.fields["due"] > FIRST_SECONDS:
                self._print(task)
        self._now = None

    def print_now_and_then(self, over: threading.Event) -> None:
        """Print plain lines; from a thread, as some work reports nothing before its end."""
        while not over.wait(min(1.0, FIRST_SECONDS)):
            with self._lock:
                if (task := self._now) is not None and (task.elapsed or 0.0) >= task.fields["due"]:
                    task.fields["due"] += LINE_SECONDS
                    self._print(task)

    def _print(self, task: Task) -> None:
        of, done = task.fields["of"], int(task.completed)
        count = [] if of is None else [f"{done:,} of {of:,} ({task.percentage:.0f}%)"]
        print_line(f"{task.description}: {'  '.join([*count, *numbers(task)])}")

    def training(self, what: str = "training") -> Callable[[TrainingState], None]:
        """A watcher for `fit`: prints its notes, shows and records its losses."""

        def watch(now: TrainingState) -> None:
            if now.note is not None:
                return None if self._quiet else print_line(now.note)
            values = {"loss": now.loss, "val loss": now.val_loss}
            losses = {name: value for name, value in values.items() if value is not None}
            skipped = [f"{now.skipped:,} steps not finite, left out"] if now.skipped else []
            self(what, now.images, now.total, *(f"{name} {value:.3f}" for name, value in losses.items()), *skipped)
            due = time.monotonic() >= self._written + SCALAR_SECONDS or now.images == now.total
            if self._writer is not None and due:
                self._written = time.monotonic()
                for name, value in losses.items():
                    self._writer.add_scalar(name, value, now.images)
                self._writer.add_scalar("images per second", now.rate or 0.0, now.images)

        return watch


@contextmanager
def progress(*, quiet: bool = False, tensorboard: str | None = None) -> Iterator[Display]:
    """A display for the time of a block; `quiet` shows nothing."""
    percent, right = TextColumn("{task.percentage:>3.0f}%"), Numbers(Column(no_wrap=True))
    columns = TextColumn("{task.description}"), BarColumn(24), percent, right
    bars = Bars(*columns, console=console, disable=quiet or not console.is_terminal)
    over = threading.Event()
    with nullcontext() if tensorboard is None else closing(summary_writer(tensorboard)) as writer, bars:
        display = Display(bars, quiet, writer)
        if not quiet and not console.is_terminal:
            threading.Thread(target=display.print_now_and_then, args=(over,), daemon=True).start()
        try:
            yield display
            display.finish()
        finally:
            over.set()


def summary_writer(folder: str) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise UserError(f"--tensorboard {folder}: pip install 'atoll-diffusion[tensorboard]'") from error
    return SummaryWriter(folder)
