"""What a person sees of long work: a bar in a terminal, lines in a log, curves in TensorBoard."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import subprocess
import time
from pathlib import Path

import pytest
from rich.console import Console

from atoll.cli import progress as module
from atoll.cli.progress import progress
from atoll.islands import train as island
from atoll.islands.train import train
from atoll.training.loop import Progress
from atoll.training.resources import Resources
from runs import ATOLL
from tiny_orders import tiny_order

CPU = Resources("cpu")
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "100", "TERM": "xterm"}


@pytest.fixture(scope="module")
def order(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_order(tmp_path_factory.mktemp("run"), images=320)


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that stands still until it is set."""
    seconds = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: seconds[0])
    return seconds


def screen(monkeypatch: pytest.MonkeyPatch, width: int, terminal: bool) -> io.StringIO:
    stream = io.StringIO()
    console = Console(file=stream, width=width, force_terminal=terminal, legacy_windows=False)
    console.get_time = time.monotonic
    monkeypatch.setattr(module, "console", console)
    return stream


@pytest.mark.parametrize("width", [40, 60, 80, 100, 160])
def test_the_bar_is_one_line_with_the_time_left(monkeypatch: pytest.MonkeyPatch, now: list[float], width: int) -> None:
    stream = screen(monkeypatch, width, terminal=True)
    with progress() as display:
        watch = display.training()
        watch(Progress(41_000_000, 100_000_000, loss=0.4312, val_loss=0.3951))  # resumed: no rate yet
        now[0] += 10
        watch(Progress(41_003_000, 100_000_000, loss=0.4312, val_loss=0.3951))
    lines = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", stream.getvalue()).replace("\r", "\n").splitlines()
    assert all(len(line) <= width for line in lines)
    last = [line for line in lines if line.strip()][-1]
    assert "41%" in last
    assert "left 54:37:37" in last, "58,997,000 images at 300 a second"
    assert ("val loss 0.395" in last) == (width >= 80), last


def test_without_a_terminal_long_work_prints_a_line_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also work that reports nothing until it is done; short work leaves no line."""
    stream = screen(monkeypatch, 80, terminal=False)
    monkeypatch.setattr(module, "FIRST_SECONDS", 0.05)
    with progress() as display:
        display("reading images", 1, 2)
        display("fitting clusters", 0, None)
        time.sleep(0.3)
        watch = display.training("encoding images with a network of a name that fills the line")
        watch(Progress(0, 200, note="computing: micro-batch [16], " + "and so on " * 20))
        watch(Progress(10, 200, loss=0.5, val_loss=0.25))
        time.sleep(0.3)
        watch(Progress(200, 200, skipped=3))
    lines = [re.sub(r"\d:\d\d|[\d.,]+/s", "#", line) for line in stream.getvalue().splitlines()]
    what = "encoding images with a network of a name that fills the line"
    assert lines == [
        "fitting clusters: #",
        "computing: micro-batch [16], " + "and so on " * 20,
        "fitting clusters: took #",
        f"{what}: 10 of 200 (5%)  #  loss 0.500  val loss 0.250",
        f"{what}: 200 of 200 (100%)  took #  #  3 steps not finite, left out",
    ]


def test_quiet_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with progress(quiet=True) as display:
        watch = display.training()
        watch(Progress(0, 10, note="a note"))
        watch(Progress(10, 10, rate=1.0))
    assert capsys.readouterr().out == ""


def test_a_real_run_shows_a_bar_in_a_terminal_and_one_line_elsewhere(order: Path, tmp_path: Path) -> None:
    command = [*ATOLL, "train", str(order), "--device", "cpu", "--out"]
    plain = subprocess.run([*command, tmp_path / "a"], env=ENVIRONMENT, capture_output=True, text=True, check=True)
    assert {line.split()[0] for line in plain.stdout.splitlines()} <= {"training:", "expert"}, "lines if it takes long"
    assert "\x1b" not in plain.stdout

    ours, theirs = pty.openpty()
    process = subprocess.Popen([*command, tmp_path / "b"], env=ENVIRONMENT, stdout=theirs, stderr=theirs)
    os.close(theirs)
    shown = b""
    while True:
        try:
            part = os.read(ours, 65536)
        except OSError:  # the other side is closed
            break
        shown += part
    os.close(ours)
    assert process.wait() == 0
    text = shown.decode()
    for part in ("training", "━", "100%", "took 0:0", "  loss ", "  val loss "):
        assert part in text, part


def test_the_log_has_losses_and_rate(order: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(island, "LOG_SECONDS", (0.0, 0.0))
    train(order, tmp_path / "expert", resources=CPU)
    entries = [json.loads(line) for line in (tmp_path / "expert" / "log.jsonl").read_text().splitlines()]
    assert [entry["event"] for entry in entries] == ["start", *["progress"] * 10, "finished"]
    rows = [json.loads(line) for line in (tmp_path / "expert" / "metrics.jsonl").read_text().splitlines()]
    steps = entries[1:-1]
    assert [entry["images"] for entry in steps] == list(range(32, 352, 32))
    assert [(entry["loss"], entry["val_loss"]) for entry in steps] == [(r["loss"], r["val_loss"]) for r in rows]
    assert steps[-1]["images_per_s"] > 0


def test_a_log_of_a_long_run_stays_short(order: Path, tmp_path: Path) -> None:
    began = time.monotonic()
    train(order, tmp_path / "expert", resources=CPU)
    seconds = time.monotonic() - began
    entries = (tmp_path / "expert" / "log.jsonl").read_text().splitlines()
    assert len(entries) <= 4 + seconds, "start, the first step, the last one, the end, and one a second at most"


def test_tensorboard_reads_what_is_written_for_it(order: Path, tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    with progress(quiet=True, tensorboard=str(tmp_path / "board")) as display:
        artifact = train(order, tmp_path / "expert", resources=CPU, watch=display.training())
    assert artifact is not None
    last = json.loads(artifact.read("metrics.jsonl").splitlines()[-1])
    events = accumulator.EventAccumulator(str(tmp_path / "board"))
    events.Reload()
    assert set(events.Tags()["scalars"]) == {"loss", "val loss", "images per second"}
    for name, value in (("loss", last["loss"]), ("val loss", last["val_loss"])):
        point = events.Scalars(name)[-1]
        assert (point.step, point.value) == (320, pytest.approx(value, rel=1e-6)), "against images seen"
