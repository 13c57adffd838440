"""What a person sees of a training: a bar in a terminal, a plain line a minute elsewhere, TensorBoard if asked."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as Bar

from ..artifacts import UserError
from ..training.loop import Progress, Watch
from .bars import FIRST_LINE_SECONDS, LINE_SECONDS, console

SCALAR_SECONDS = 5.0
NARROWEST_BAR = 6  # characters


@contextmanager
def watching(what: str, *, quiet: bool = False, tensorboard: str | None = None) -> Iterator[Watch]:
    """A watcher for `fit`: shows every note once, and where the training stands."""
    began = time.monotonic()
    scalars = None if tensorboard is None else Scalars(tensorboard)
    show = Lines(what) if not quiet and not console.is_terminal else None
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),  # gives way in a narrow terminal, down to NARROWEST_BAR
        TextColumn("{task.percentage:>3.0f}%"),
        TextColumn("{task.fields[numbers]}"),
    )
    with Bar(*columns, console=console, disable=quiet or not console.is_terminal) as bar:
        task = bar.add_task(what, total=None, numbers="")

        def watch(now: Progress) -> None:
            if now.note is not None:
                if not quiet:
                    say(now.note)
                return
            numbers = numbers_of(now, time.monotonic() - began)
            room = console.width - len(f"{what}  100% ") - NARROWEST_BAR
            bar.update(task, completed=now.images, total=now.total, numbers=fitting(numbers, room))
            if show is not None:
                show(now, fitting(numbers))
            if scalars is not None:
                scalars(now)

        try:
            yield watch
        finally:
            if scalars is not None:
                scalars.close()


def say(text: str) -> None:
    """Print a line as it is; in a log, where nobody knows how wide the screen will be, without breaking it."""
    console.print(text, markup=False, highlight=False, soft_wrap=not console.is_terminal)


def numbers_of(now: Progress, seconds: float) -> list[str]:
    """`left 1:02:33`, `312 images/s`, `loss 0.431`, `val loss 0.395`, as far as known, most wanted first."""
    parts = []
    if now.images == now.total:
        parts.append(f"took {clock(seconds)}")
    elif now.seconds_left is not None:
        parts.append(f"left {clock(now.seconds_left)}")
    if now.rate is not None:
        parts.append(f"{now.rate:,.0f} images/s" if now.rate >= 10 else f"{now.rate:.2g} images/s")
    if now.loss is not None:
        parts.append(f"loss {now.loss:.3f}")
    if now.val_loss is not None:
        parts.append(f"val loss {now.val_loss:.3f}")
    if now.skipped:
        parts.append(f"{now.skipped} steps not finite, left out")
    return parts


def fitting(parts: list[str], room: int | None = None) -> str:
    """As many of the parts, from the first, as `room` characters hold."""
    while room is not None and parts and len("  ".join(parts)) > room:
        parts = parts[:-1]
    return "  ".join(parts)


def clock(seconds: float) -> str:
    """`0:07`, `12:34`, `1:02:33`."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"


class Lines:
    """A plain line soon, and then one a minute, for logs of a machine nobody sits at."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._due = time.monotonic() + FIRST_LINE_SECONDS

    def __call__(self, now: Progress, numbers: str) -> None:
        if time.monotonic() < self._due and now.images < now.total:
            return
        self._due = time.monotonic() + LINE_SECONDS
        share = 100 * now.images / now.total
        say(f"{self._what}: {now.images:,} of {now.total:,} images ({share:.0f}%)  {numbers}")


class Scalars:
    """Loss, validation loss and rate against images seen, for TensorBoard."""

    def __init__(self, folder: str) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise UserError(
                f"--tensorboard {folder}: needs an extra: pip install 'atoll-diffusion[tensorboard]'"
            ) from error
        self._writer: Any = SummaryWriter(folder)
        self._written = 0.0

    def __call__(self, now: Progress) -> None:
        if time.monotonic() - self._written < SCALAR_SECONDS and now.images < now.total:
            return
        self._written = time.monotonic()
        for name, value in (("loss", now.loss), ("val_loss", now.val_loss), ("images per second", now.rate)):
            if value is not None:
                self._writer.add_scalar(name, value, now.images)

    def close(self) -> None:
        self._writer.close()
