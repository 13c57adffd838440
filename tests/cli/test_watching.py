"""What a person sees of a training: lines in a log, a bar in a terminal, curves in TensorBoard."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import time
from pathlib import Path

import pytest

from atoll.cli import watching as module
from atoll.cli.watching import watching
from atoll.islands import train as island
from atoll.islands.train import train
from atoll.training.loop import Progress
from atoll.training.resources import Resources
from runs import ATOLL
from tiny_orders import tiny_order

CPU = Resources("cpu")
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "400", "TERM": "xterm"}


@pytest.fixture(scope="module")
def order(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_order(tmp_path_factory.mktemp("run"), images=320)


def test_the_log_has_loss_val_loss_and_rate(order: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(island, "LOG_SECONDS", (0.0, 0.0))
    train(order, tmp_path / "expert", resources=CPU)
    entries = [json.loads(line) for line in (tmp_path / "expert" / "log.jsonl").read_text().splitlines()]
    assert [entry["event"] for entry in entries] == ["start", *["progress"] * 10, "finished"]
    rows = [json.loads(line) for line in (tmp_path / "expert" / "metrics.jsonl").read_text().splitlines()]
    steps = entries[1:-1]
    assert [entry["images"] for entry in steps] == list(range(32, 352, 32))
    assert [(entry["loss"], entry["val_loss"]) for entry in steps] == [(r["loss"], r["val_loss"]) for r in rows]
    assert steps[-1]["images_per_s"] > 0
    assert all(entry["time"] > 1.7e9 for entry in entries)


def test_a_log_of_a_long_run_stays_short(order: Path, tmp_path: Path) -> None:
    began = time.monotonic()
    train(order, tmp_path / "expert", resources=CPU)
    seconds = time.monotonic() - began
    entries = (tmp_path / "expert" / "log.jsonl").read_text().splitlines()
    assert len(entries) <= 4 + seconds, "start, the first step, the last one, the end, and one a second at most"


def test_without_a_terminal_there_is_a_plain_line_now_and_then(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    with watching("training") as watch:
        for second in range(0, 141, 10):
            now[0] = float(second)
            watch(Progress(100 * second, 20_000, rate=100.0, loss=0.5, val_loss=0.25))
        watch(Progress(0, 20_000, note="out of memory; going on with [8] images"))
    assert capsys.readouterr().out.splitlines() == [
        "training: 1,000 of 20,000 images (5%)  left 3:10  100 images/s  loss 0.500  val loss 0.250",
        "training: 7,000 of 20,000 images (35%)  left 2:10  100 images/s  loss 0.500  val loss 0.250",
        "training: 13,000 of 20,000 images (65%)  left 1:10  100 images/s  loss 0.500  val loss 0.250",
        "out of memory; going on with [8] images",
    ]


def test_quiet_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with watching("training", quiet=True) as watch:
        watch(Progress(0, 10, note="a note"))
        watch(Progress(10, 10, rate=1.0))
    assert capsys.readouterr().out == ""


def test_a_real_run_in_a_terminal_shows_a_bar_and_elsewhere_a_line(order: Path, tmp_path: Path) -> None:
    command = [*ATOLL, "train", str(order), "--device", "cpu", "--out"]
    plain = subprocess.run([*command, tmp_path / "a"], env=ENVIRONMENT, capture_output=True, text=True, check=True)
    lines = plain.stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["training:", "expert"]
    assert "320 of 320 images (100%)" in lines[0]
    assert "val loss" in lines[0]
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
        if not part:
            break
        shown += part
    os.close(ours)
    assert process.wait() == 0
    assert "━" in shown.decode()
    assert "100%" in shown.decode()


def test_tensorboard_reads_what_is_written_for_it(order: Path, tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    with watching("training", quiet=True, tensorboard=str(tmp_path / "board")) as watch:
        artifact = train(order, tmp_path / "expert", resources=CPU, watch=watch)
    assert artifact is not None
    rows = [json.loads(line) for line in artifact.read("metrics.jsonl").splitlines()]
    events = accumulator.EventAccumulator(str(tmp_path / "board"))
    events.Reload()
    assert set(events.Tags()["scalars"]) == {"loss", "val_loss", "images per second"}
    for name in ("loss", "val_loss"):
        last = events.Scalars(name)[-1]
        assert last.step == 320, "against images seen"
        assert last.value == pytest.approx(rows[-1][name], rel=1e-6)
