"""Ctrl-C and SIGTERM in any verb: real processes and signals, one line, the usual exit code, and work that goes on."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from atoll.__main__ import main as atoll_main
from atoll.cli import VERBS
from atoll.cli.stopping import KEPT
from killed import finish, names, start
from photographs import write_photographs
from runs import ATOLL

# a verb, long enough to be stopped, and what is there when it is at work; all others are done in a moment
PAINT = "--prompt one -n 400 --steps 2000 --threads 1"
AT_WORK = {
    "prepare": ("prepare digits --out run/other", "run/.other.partial"),
    "partition": ("partition run/data -k 3 --out run/other", "run/.other.partial"),
    "train": ("train run/orders-long/00.json --out expert --device cpu", "expert/log.jsonl"),
    "router": ("router run --blind --out r --set training.images=400000 --device cpu", "r/state/.lock"),
    "distill": ("distill run --out s --set training.images=400000 --device cpu", "s/state/.lock"),
    "sample": (f"sample run {PAINT} --out painted", "painted/calls/.lock"),
    "evaluate": ("evaluate run -n 4000 --steps 2000 --threads 1 --out results", ""),
}


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("verb", AT_WORK)
def test_it_says_what_is_kept_and_with_which_signal_it_ended(
    verb: str, number: int, code: int, tiny_demo: Path, tmp_path: Path
) -> None:
    shutil.copytree(tiny_demo, tmp_path / "run", ignore=shutil.ignore_patterns("islands", "samples"))
    if verb == "train":  # the demo's own order is done in a moment
        finish(["plan", "run/data", "--out", "run/orders-long", "--images", "4M"], tmp_path)
    command, sign = AT_WORK[verb]
    process = start(command.split(), tmp_path)
    deadline = time.monotonic() + 60
    while process.is_alive() and sign and not (tmp_path / sign).exists():
        assert time.monotonic() < deadline, "it never began"
        time.sleep(0.002)
    time.sleep(0.05 if sign else 0.7)
    assert process.pid is not None
    os.kill(process.pid, number)
    process.join(60)
    said = (tmp_path / "said.txt").read_text().splitlines()
    assert process.exitcode == code, said
    assert not any("Traceback" in line for line in said)
    kept = "stopped and saved after" if "saved after" in said[-1] else KEPT[verb]
    assert kept in said[-1]
    assert said[-1].startswith("atoll: stopped")


def test_every_verb_has_something_to_say() -> None:
    assert set(VERBS) <= set(KEPT)


def test_who_stops_it_before_it_listens_gets_a_line_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The moment in which it loads is the one in which somebody sees a wrong word in the command."""

    class Loading:
        @property
        def main(self) -> None:
            raise KeyboardInterrupt

    monkeypatch.setitem(sys.modules, "atoll.cli", Loading())  # type: ignore[arg-type]
    with pytest.raises(SystemExit) as ended:
        atoll_main()
    assert ended.value.code == 130
    assert capsys.readouterr().err == "atoll: stopped (Ctrl-C): nothing was begun\n"


def test_ctrl_c_in_a_terminal_goes_to_all_processes_and_one_answers(tmp_path: Path) -> None:
    """`prepare` with two workers, as the shell does it: the signal for the whole group."""
    write_photographs(tmp_path / "photos", per_class=150, size=48)
    command = [
        *ATOLL,
        "prepare",
        "photos",
        "--out",
        "run/data",
        "--size",
        "32",
        "--features",
        "pixels",
        "--workers",
        "2",
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    chunks = tmp_path / "run" / ".data.partial" / "state" / "chunks"
    while process.poll() is None and not chunks.exists():
        time.sleep(0.002)
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, "")
    assert err == f"atoll: stopped (Ctrl-C): {KEPT['prepare']}\n"
    subprocess.run(command, cwd=tmp_path, env=environment, check=True, capture_output=True)
    assert not any(name.endswith(".partial") for name in names(tmp_path / "run"))
