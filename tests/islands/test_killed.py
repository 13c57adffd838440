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


@pytest.mark.parametrize("kills", [4, pytest.param(20, marks=[pytest.mark.slow, pytest.mark.timeout(900)])])
def test_killed_at_random_moments_it_ends_with_the_digest_of_an_unbroken_run(tmp_path: Path, kills: int) -> None:
    """One process after the other in one folder, as a preempted machine would start them.

    Moments are spread evenly over the time of an unbroken run: some hit the imports, some the training, some the end.
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
        process = subprocess.Popen(command, env=ENVIRONMENT)
        time.sleep(duration * numbers.random())
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


def stage(out: Path) -> str:
    """How far a killed process came."""
    if find(out) is not None:
        return "finished"
    return "training" if list(out.glob("state/*.safetensors")) else "starting"
