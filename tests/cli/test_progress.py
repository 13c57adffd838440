"""What is shown of long work: a bar in a terminal, lines in a log, curves in TensorBoard."""

from __future__ import annotations

import io
import re
import time
from pathlib import Path

import pytest
from rich.console import Console

from atoll.cli import progress as module
from atoll.cli import tables
from atoll.cli.progress import progress
from atoll.training.loop import Progress


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that stands still until it is set."""
    seconds = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: seconds[0])
    return seconds


def screen(monkeypatch: pytest.MonkeyPatch, width: int, terminal: bool) -> io.StringIO:
    stream = io.StringIO()
    console = Console(file=stream, width=width, force_terminal=terminal, legacy_windows=False)
    for place in (module, tables):
        monkeypatch.setattr(place, "console", console)
    return stream


@pytest.mark.parametrize("width", [40, 60, 100])
def test_the_bar_is_one_line_with_the_time_left(monkeypatch: pytest.MonkeyPatch, now: list[float], width: int) -> None:
    stream = screen(monkeypatch, width, terminal=True)
    with progress() as display:
        watch = display.training()
        watch(Progress(41_000_000, 100_000_000, loss=0.4312, val_loss=0.3951))  # resumed: no rate yet
        now[0] += 10
        watch(Progress(41_003_000, 100_000_000, loss=0.4312, val_loss=0.3951))
        display._bars.refresh()
        shown = stream.getvalue()
    lines = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown).replace("\r", "\n").splitlines()
    assert all(len(line) <= width for line in lines)
    last = [line for line in lines if line.strip()][-1]
    assert "41%" in last
    assert "left 54:37:37" in last, "58,997,000 images at 300 a second"
    assert ("val loss 0.395" in last) == (width >= 100), last


def test_without_a_terminal_long_work_prints_a_line_now_and_then(
    monkeypatch: pytest.MonkeyPatch, now: list[float]
) -> None:
    """Work that reports nothing until it is done has one line; short work has none."""
    stream = screen(monkeypatch, 80, terminal=False)
    note = "computing: micro-batch [16], " + "and so on " * 20
    with progress() as display:
        display("reading images", 1, 2)
        display("fitting clusters", 0, None)
        now[0] += 200
        watch = display.training("encoding images")
        watch(Progress(0, 200, note=note))
        watch(Progress(0, 200))
        for images in (10, 20, 200):
            now[0] += 10
            watch(Progress(images, 200, loss=0.5, val_loss=0.25, skipped=3 * (images == 200)))
    assert stream.getvalue().splitlines() == [
        note,
        "fitting clusters: took 3:20",
        "encoding images: 10 of 200 (5%)  left 3:10  1/s  loss 0.500  val loss 0.250",
        "encoding images: 200 of 200 (100%)  took 0:30  6.7/s  loss 0.500  val loss 0.250  "
        "3 steps not finite, left out",
    ]


def test_quiet_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with progress(quiet=True) as display:
        watch = display.training()
        watch(Progress(0, 10, note="a note"))
        watch(Progress(10, 10, rate=1.0))
    assert capsys.readouterr().out == ""


def test_tensorboard_reads_what_is_written_for_it(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    with progress(quiet=True, tensorboard=str(tmp_path)) as display:
        watch = display.training()
        watch(Progress(320, 320, rate=9.0, loss=0.5, val_loss=0.25))
    events = accumulator.EventAccumulator(str(tmp_path))
    events.Reload()
    found = {name: events.Scalars(name)[-1] for name in events.Tags()["scalars"]}
    assert {name: (point.step, point.value) for name, point in found.items()} == {
        "loss": (320, 0.5), "val loss": (320, 0.25), "images per second": (320, 9.0),
    }  # fmt: skip


def test_words_of_others_reach_the_terminal_as_words(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = screen(monkeypatch, 80, terminal=True)
    tables.print_line("in [red]a[/nope] \x1b[2J")
    tables.print_table("a b", [("[red]x", "\x1b[2Jy\nz")], "[bold]")
    shown = stream.getvalue()
    assert "[red]a[/nope] ?[2J" in shown
    assert "[red]x" in shown
    assert "\x1b[2J" not in shown
