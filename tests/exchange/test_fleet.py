"""Launch files that their own programs can read, and a published place at a glance."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from atoll.artifacts import Artifact, Store
from atoll.artifacts.signing import allowed_line, fingerprint
from atoll.exchange.lease_status import lease_status, names_by_key
from atoll.exchange.leases import LeaseFile, Leases
from atoll.exchange.published import publish
from atoll.planning.launch import write_launch
from exchange.test_signatures import new_key
from runs import atoll


@pytest.fixture
def run(planned: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(planned, tmp_path / "a run"))


SBATCH = """#!/bin/bash
# as much of sbatch as a launch file asks for: its options are read, and its script is run by its own interpreter
bash -n "$1" || exit 1
sed -n 's/^#SBATCH //p' "$1" > options
exec "$(sed -n '1s/^#!//p' "$1")" "$1" > "$(sed -n 's/^--output=//p' options)" 2>&1
"""


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["shell", "slurm"])
@pytest.mark.parametrize("joins", [False, True])
def test_a_launch_file_makes_an_expert(launcher: str, joins: bool, run: Path, tmp_path: Path) -> None:
    """Launched for real, twice, as a scheduler does with a job that was stopped; slurm's by a small sbatch."""
    url = tmp_path / "public" if joins else None
    if url is not None:
        publish(Store.at(run), Store.at(url))
    files = write_launch(Artifact.open(run / "orders"), launcher, None if url is None else str(url)).path
    programs = {
        "atoll": f'#!/bin/sh\nexec {sys.executable} -m atoll "$@"\n',
        "sbatch": SBATCH,
        "srun": '#!/bin/sh\nexec "$@"\n',
    }
    (tmp_path / "bin").mkdir()
    for name, text in programs.items():
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    (tmp_path / "home").mkdir()
    environment = {**os.environ, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    environment["HOME"] = str(tmp_path / "home")  # nobody's key
    command = ["sh", str(files / "01.sh")] if launcher == "shell" else ["sbatch", str(files / "01.sbatch")]
    for attempt in range(2):
        with (tmp_path / f"said-{attempt}").open("w") as said:
            process = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=said, stderr=said)
            if attempt == 0:
                while not list(tmp_path.glob("expert-01/**/state")):
                    assert process.poll() is None
                    time.sleep(0.01)
                process.kill()  # the verb itself: every script on the way has become it
            assert (process.wait() == 0) is (attempt == 1), (tmp_path / f"said-{attempt}").read_text()
    expert = Artifact.open(tmp_path / "expert-01" / "expert" if joins else tmp_path / "expert-01", "expert")
    assert expert.manifest.config["cluster"] == 1
    assert len(list((tmp_path / "public").glob("inbox/*/*/manifest.json"))) == (1 if joins else 0)
    if launcher == "slurm":
        options = (tmp_path / "options").read_text().splitlines()
        assert "--requeue" in options
        assert (tmp_path / "atoll-01.log").stat().st_size > 0


def test_status_of_what_was_published_shows_work_in_the_lists_names(run: Path, tmp_path: Path) -> None:
    public = tmp_path / "public"
    card, key = publish(Store.at(run), Store.at(public)), new_key(tmp_path, "key")
    leases = Leases(Store.at(public), card.lease_seconds)
    lease = leases.take(card.orders[1].lease, fingerprint(key))
    assert lease is not None
    leases.renew(lease, LeaseFile(holder=fingerprint(key), images=480, total=1920, seconds_left=7200.0))
    (public / "inbox" / "x" / "02-0123456789ab").mkdir(parents=True)
    (public / "inbox" / "x" / "02-0123456789ab" / "manifest.json").write_text("{}")
    (public / "inbox" / "x" / "02-half").mkdir()
    rows = {row.order: row for row in lease_status(Store.at(public), card)}
    states = {order: (row.state, row.hours_left, row.received) for order, row in rows.items()}
    assert states == {"00": ("free", None, 0), "01": ("taken", 2.0, 0), "02": ("free", None, 1)}
    assert rows["01"].lease is not None
    assert rows["01"].lease.progress == 0.25
    (tmp_path / "signers").write_bytes(allowed_line("alice", key))
    assert names_by_key((tmp_path / "signers").read_bytes()) == {fingerprint(key): "alice"}
    shown = atoll("status", public, "--signers", tmp_path / "signers").stdout
    assert "alice" in shown
    assert "25%" in shown
    missing = atoll("status", public, "--signers", tmp_path / "missing", check=False)
    assert missing.returncode == 2
    assert f"--signers {tmp_path / 'missing'}: cannot be read" in missing.stderr


def test_a_runs_status_tells_of_what_was_refused(run: Path) -> None:
    (run / "quarantine" / "01-0123456789ab").mkdir(parents=True)
    reason = {"reason": "it: refused, [/nope] \x1b[2J too bad"}
    (run / "quarantine" / "01-0123456789ab" / "reasons.json").write_text(json.dumps(reason))
    shown = atoll("status", run).stdout
    assert "too bad" in " ".join(shown.split())
    assert "\x1b[2J" not in shown
