"""kill -9 at random moments, from the first import to the last rename: the digest of an unbroken run."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from pathlib import Path

import pytest

from atoll.artifacts import Artifact, find
from runs import ATOLL
from tiny_orders import tiny_order

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


@pytest.mark.parametrize("kills", [2, pytest.param(20, marks=[pytest.mark.slow, pytest.mark.timeout(900)])])
def test_killed_at_random_moments_it_ends_with_the_digest_of_an_unbroken_run(tmp_path: Path, kills: int) -> None:
    """One process after the other in one folder, as a preempted machine would start them.

    Every other moment is any of an unbroken run's, so that imports and the end are hit too; the others come soon after
    a checkpoint was written, so that training is.
    """
    order = tiny_order(tmp_path / "run", images=2048 + 5, batch=32)
    out = tmp_path / "expert"
    common = [*ATOLL, "train", str(order), "--quiet", "--checkpoint-seconds", "0", "--device", "cpu", "--out"]
    command = [*common, str(out)]

    began = time.monotonic()
    subprocess.run([*common, str(tmp_path / "unbroken")], env=ENVIRONMENT, check=True)
    duration = time.monotonic() - began
    unbroken = Artifact.open(tmp_path / "unbroken")

    numbers = random.Random(kills)
    killed, stages = 0, set()
    for attempt in range(4 * kills):
        if killed == kills:
            break
        before = saved(out)
        process = subprocess.Popen(command, env=ENVIRONMENT)
        while killed % 2 and process.poll() is None and saved(out) == before:
            time.sleep(0.005)
        time.sleep(duration * numbers.random() * (0.1 if killed % 2 else 1.0))
        process.kill()
        if process.wait() == -signal.SIGKILL:
            killed += 1
            stages.add(stage(out))
        else:  # little was left, and it is done; what was tested so far must hold, and it starts anew
            assert process.returncode == 0
            assert Artifact.open(out).digest == unbroken.digest
            out.rename(tmp_path / f"done-{attempt}")
    assert killed == kills
    subprocess.run(command, env=ENVIRONMENT, check=True)
    assert Artifact.open(out).digest == unbroken.digest
    assert "training" in stages, f"it was never killed while it trained, only here: {stages}"


def saved(out: Path) -> set[Path]:
    return set(out.glob("state/*.safetensors"))


def stage(out: Path) -> str:
    """How far a killed process came."""
    if find(out) is not None:
        return "finished"
    return "training" if saved(out) else "starting"
