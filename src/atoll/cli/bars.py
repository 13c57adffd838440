"""Progress bars with a rate and the time left."""

from __future__ import annotations

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

console = Console()


class Rate(ProgressColumn):
    """Units per second, such as `1,250 images/s`."""

    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        return Text("" if speed is None else f"{speed:,.0f} {task.fields['unit']}/s", style="dim")


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
            self._tasks[task] = self._progress.add_task(task, total=total, unit=self._unit)
        self._progress.update(self._tasks[task], completed=done, total=total)

    def finish_open(self) -> None:
        """Fill the bars whose total nobody knew."""
        for bar in self._progress.tasks:
            if bar.total is None:
                done = max(1, int(bar.completed))
                self._progress.update(bar.id, completed=done, total=done)


@contextmanager
def bars(unit: str = "images", *, quiet: bool = False) -> Iterator[Bars]:
    """Show bars while a stage works; with `quiet` they are counted and not shown."""
    columns = (
        TextColumn("{task.description:<22}"),
        BarColumn(bar_width=32),
        TextColumn("{task.percentage:>3.0f}%"),
        Rate(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, disable=quiet or not console.is_terminal) as progress:
        shown = Bars(progress, unit)
        yield shown
        shown.finish_open()
