"""What a person sees of a training: a bar in a terminal, a plain line a minute elsewhere, and TensorBoard if asked."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from ..artifacts import UserError
from ..training.loop import Progress, Watch
from .bars import console

LINE_SECONDS = 60.0
SCALAR_SECONDS = 5.0


@contextmanager
def watching(what: str, *, quiet: bool = False, tensorboard: str | None = None) -> Iterator[Watch]:
    """A watcher for `fit`: shows every note once, and where the training stands."""
    scalars = None if tensorboard is None else Scalars(tensorboard)
    show = Lines(what) if not quiet and not console.is_terminal else None
    columns = (
        TextColumn("{task.description:<12}"),
        BarColumn(bar_width=24),
        TextColumn("{task.percentage:>3.0f}%"),
        TextColumn("{task.fields[numbers]}"),
        TimeElapsedColumn(),
    )
    with Bar(*columns, console=console, disable=quiet or not console.is_terminal) as bar:
        task = bar.add_task(what, total=None, numbers="")

        def watch(now: Progress) -> None:
            if now.note is not None:
                if not quiet:
                    console.print(now.note, markup=False, highlight=False)
                return
            bar.update(task, completed=now.images, total=now.total, numbers=numbers_of(now))
            if show is not None:
                show(now)
            if scalars is not None:
                scalars(now)

        try:
            yield watch
        finally:
            if scalars is not None:
                scalars.close()


def numbers_of(now: Progress) -> str:
    """`5,312 images/s  loss 0.4312  yardstick 0.3951  left 1:02:33`, as far as known."""
    parts = []
    if now.rate is not None:
        parts.append(f"{now.rate:,.0f} images/s")
    if now.loss is not None:
        parts.append(f"loss {now.loss:.4f}")
    if now.yardstick is not None:
        parts.append(f"yardstick {now.yardstick:.4f}")
    if now.skipped:
        parts.append(f"{now.skipped} steps not finite, left out")
    if now.seconds_left is not None:
        parts.append(f"left {clock(now.seconds_left)}")
    return "  ".join(parts)


def clock(seconds: float) -> str:
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}"


class Lines:
    """One plain line a minute, for logs of a machine nobody sits at."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._said = time.monotonic()

    def __call__(self, now: Progress) -> None:
        if time.monotonic() - self._said < LINE_SECONDS and now.images < now.total:
            return
        self._said = time.monotonic()
        share = 100 * now.images / now.total
        text = f"{self._what}: {now.images:,} of {now.total:,} images ({share:.0f}%)  {numbers_of(now)}"
        console.print(text, markup=False, highlight=False, soft_wrap=True)


class Scalars:
    """Loss, yardstick and rate against images seen, for TensorBoard."""

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
        for name, value in (("loss", now.loss), ("yardstick", now.yardstick), ("images per second", now.rate)):
            if value is not None:
                self._writer.add_scalar(name, value, now.images)

    def close(self) -> None:
        self._writer.close()
