"""Ctrl-C and SIGTERM in any command: real processes and signals, one line, exit code 130, and the command resumes."""

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
from killed import finish, names, start
from photographs import write_photographs
from runs import ATOLL

INTERRUPTED = "atoll: Interrupted. Run the same command again.\n"
# a command long enough to be stopped, and what is there when it is at work; all others are done in a moment
AT_WORK = {
    "partition": ("partition run/data -k 3 --out run/other", "run/.other.partial"),
    "train": ("train run/orders-long/00.json --out expert --device cpu", "expert/log.jsonl"),
    "router": ("router run --blind --out r --set training.images=400000 --device cpu", "r/state/.lock"),
    "sample": ("sample run --prompt one -n 400 --steps 2000 --threads 1 --out generated", "generated/calls/.lock"),
    "evaluate": ("evaluate run -n 4000 --steps 2000 --threads 1 --out results", ""),
}


@pytest.mark.parametrize("command", AT_WORK)
def test_one_line_and_exit_code_130(command: str, tiny_demo: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_demo, tmp_path / "run", ignore=shutil.ignore_patterns("islands", "samples"))
    if command == "train":  # the demo's own order is done in a moment
        finish(["plan", "run/data", "--out", "run/orders-long", "--images", "4M"], tmp_path)
    line, sign = AT_WORK[command]
    process = start(line.split(), tmp_path)
    deadline = time.monotonic() + 60
    while process.is_alive() and sign and not (tmp_path / sign).exists():
        assert time.monotonic() < deadline, "it never began"
        time.sleep(0.002)
    time.sleep(0.05 if sign else 0.7)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGTERM if command in ("train", "sample") else signal.SIGINT)
    process.join(60)
    printed = (tmp_path / "printed.txt").read_text().splitlines()
    assert process.exitcode == 130, printed
    assert not any("Traceback" in line for line in printed)
    assert printed[-1].startswith("atoll: Interrupted")
    assert printed[-1].endswith(". Run the same command again.")


def test_ctrl_c_while_the_command_line_loads(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Loading:
        @property
        def main(self) -> None:
            raise KeyboardInterrupt

    monkeypatch.setitem(sys.modules, "atoll.cli", Loading())  # type: ignore[arg-type]
    with pytest.raises(SystemExit) as ended:
        atoll_main()
    assert ended.value.code == 130
    assert capsys.readouterr().err == INTERRUPTED


def test_ctrl_c_in_a_terminal_goes_to_all_processes_and_one_answers(tmp_path: Path) -> None:
    """`prepare` with two workers, as the shell does it: the signal for the whole group."""
    write_photographs(tmp_path / "photos", per_class=150, size=48)
    options = "--out run/data --size 32 --features pixels --workers 2"
    command = [*ATOLL, "prepare", "photos", *options.split()]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    partial = tmp_path / "run" / ".data.partial"
    while process.poll() is None and not partial.exists():
        time.sleep(0.002)
    time.sleep(0.3)
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (130, "", INTERRUPTED)
    subprocess.run(command, cwd=tmp_path, env=environment, check=True, capture_output=True)
    assert not any(name.endswith(".partial") for name in names(tmp_path / "run"))
