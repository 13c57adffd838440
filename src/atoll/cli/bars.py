"""How far a stage is: bars with a rate and the time left in a terminal, a plain line a minute elsewhere."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from ..data.progress import Progress as Told

console = Console()
FIRST_LINE_SECONDS, LINE_SECONDS = 5.0, 60.0


class Rate(ProgressColumn):
    """Units per second, such as `1,250 images/s`."""

    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        return Text("" if speed is None else f"{speed:,.0f} {task.fields['unit']}/s", style="dim")


def unit_of(task: str, usual: str) -> str:
    """What a stage counts: `admitting experts` counts experts."""
    return "experts" if task.endswith(" experts") else usual


class Bars:
    """Bars that appear when their work begins: `bars("training", done, total)`.

    Stages work on one thing after another, so what had no known total is done when the next thing begins.
    """

    def __init__(self, progress: Progress, unit: str) -> None:
        self._progress = progress
        self._unit = unit
        self._tasks: dict[str, TaskID] = {}

    def __call__(self, task: str, done: int, total: int | None) -> None:
        if task not in self._tasks:
            self.finish_open()
            self._tasks[task] = self._progress.add_task(task, total=total, unit=unit_of(task, self._unit))
        self._progress.update(self._tasks[task], completed=done, total=total)

    def finish_open(self) -> None:
        """Fill the bars whose total nobody knew."""
        for bar in self._progress.tasks:
            if bar.total is None:
                done = max(1, int(bar.completed))
                self._progress.update(bar.id, completed=done, total=done)


class PlainLines:
    """A plain line about what is being done, soon after it begins and then one a minute, and one at its end.

    They come from a thread of their own, since some work says nothing until it is done. Short work leaves no line.
    """

    def __init__(self, unit: str) -> None:
        self._unit = unit
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._task = ""
        self._done, self._total = 0, None  # type: tuple[int, int | None]
        self._began, self._due, self._lines = 0.0, float("inf"), 0
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> PlainLines:
        self._thread.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._over.set()
        self._thread.join()
        if error is None:
            self._finish()

    def __call__(self, task: str, done: int, total: int | None) -> None:
        with self._lock:
            if task != self._task:
                self._finish()
                self._task, self._began, self._lines = task, time.monotonic(), 0
                self._due = self._began + FIRST_LINE_SECONDS
            self._done, self._total = done, total

    def _watch(self) -> None:
        while not self._over.wait(min(1.0, FIRST_LINE_SECONDS)):
            with self._lock:
                if time.monotonic() >= self._due:
                    self._due += LINE_SECONDS
                    self._lines += 1
                    self._say("")

    def _finish(self) -> None:
        """The last line of a task that had one before."""
        if self._lines:
            self._say(", done")

    def _say(self, state: str) -> None:
        seconds = time.monotonic() - self._began
        of = "" if self._total is None else f" of {self._total:,}"
        rate, unit = self._done / seconds, unit_of(self._task, self._unit)
        speed = f", {rate:,.0f} {unit}/s" if rate >= 10 else f", {rate:.2g} {unit}/s"
        count = f"{self._done:,}{of} {unit}{speed}, " if self._done else ""
        line = f"{self._task}: {count}{seconds:.0f} s{state}"
        console.print(line, markup=False, highlight=False, soft_wrap=True)


@contextmanager
def bars(unit: str = "images", *, quiet: bool = False) -> Iterator[Told]:
    """Show how far a stage is while it works; with `quiet` nothing is shown."""
    if not quiet and not console.is_terminal:
        with PlainLines(unit) as lines:
            yield lines
        return
    columns = (
        TextColumn("{task.description:<22}"),
        BarColumn(bar_width=32),
        TextColumn("{task.percentage:>3.0f}%"),
        Rate(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, disable=quiet) as progress:
        shown = Bars(progress, unit)
        yield shown
        shown.finish_open()
