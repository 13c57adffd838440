"""What a person sees of a training, on screens of several widths and in a log."""

from __future__ import annotations

import io
import re
import time

import pytest
from rich.console import Console

from atoll.cli import bars, watching
from atoll.training.loop import Progress

LONG = Progress(images=41_000_000, total=100_000_000, rate=312.4, loss=0.4312, val_loss=0.3951)


def shown(monkeypatch: pytest.MonkeyPatch, *steps: Progress, width: int, terminal: bool) -> list[str]:
    """The lines that training so far would leave on a screen, without control codes."""
    stream = io.StringIO()
    console = Console(file=stream, width=width, force_terminal=terminal, legacy_windows=False)
    monkeypatch.setattr(watching, "console", console)
    with watching.watching("training") as watch:
        for step in steps:
            watch(step)
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", stream.getvalue()).replace("\r", "\n").splitlines()


@pytest.mark.parametrize("width", [40, 60, 80, 100, 160])
def test_the_bar_is_one_line_and_the_time_left_is_on_it(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    lines = shown(monkeypatch, LONG, width=width, terminal=True)
    assert all(len(line) <= width for line in lines)
    last = [line for line in lines if line.strip()][-1]
    assert "41%" in last
    assert "left 52:27:40" in last  # 59,000,000 images at 312.4 a second
    assert ("val loss 0.395" in last) == (width >= 80), last


def test_a_note_comes_once_and_a_log_has_whole_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    note = Progress(0, 10, note="computing: micro-batch [16], " + "and so on " * 20)
    end = Progress(10, 10, rate=2.5, loss=1.0)
    lines = shown(monkeypatch, note, end, end, width=80, terminal=False)
    assert lines[0] == note.note
    assert lines[1] == "training: 10 of 10 images (100%)  took 0:00  2.5 images/s  loss 1.000"


def test_what_was_left_out_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = shown(monkeypatch, Progress(10, 10, skipped=3), width=80, terminal=False)
    assert lines == ["training: 10 of 10 images (100%)  took 0:00  3 steps not finite, left out"]


def test_without_a_terminal_a_long_stage_says_so_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that tells nothing until it is done; short work leaves no line."""
    stream = io.StringIO()
    monkeypatch.setattr(bars, "console", Console(file=stream, width=80))
    monkeypatch.setattr(bars, "FIRST_LINE_SECONDS", 0.05)
    monkeypatch.setattr(bars, "LINE_SECONDS", 60.0)
    with bars.bars() as show:
        show("reading", 1, 2)
        show("measuring", 0, None)
        time.sleep(0.3)
        show("writing", 10, 200)
        time.sleep(0.3)
        show("writing", 200, 200)
    lines = [re.sub(r"\d+ s|[\d.,]+ images/s", "#", line) for line in stream.getvalue().splitlines()]
    assert lines == [
        "measuring: #",
        "measuring: #, done",
        "writing: 10 of 200 images, #, #",
        "writing: 200 of 200 images, #, #, done",
    ]
