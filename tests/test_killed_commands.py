"""kill -9 at random moments of every command that writes: nothing is lost, and nothing left after the next command."""

from __future__ import annotations

import random
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from killed import contents, finish, kill, names

# the rate these budgets were tried with; at others an expert of twenty steps may or may not pass admission
TINY = (
    "--set training.batch=32 --set training.learning_rate=0.00212132 --set training.warmup_images=64 "
    "--set training.ema_images=64"
)
ON = "--device cpu --checkpoint-seconds 0"
# the life of a run with data added later, each command can be given twice and means the same
LIFE = [
    "prepare digits[:600] --out run/data",
    "partition run/data -k 2",
    f"plan run/data --objectives 1ddpm:1flow --images 640 {TINY} --set acceptance.max_ratio_to_gaussian=1000",
    f"train run/orders/00.json --out experts/00 {ON}",
    f"train run/orders/01.json --out experts/01 {ON}",
    "admit experts/00 experts/01 --out run",
    f"router run --set training.images=640 {ON}",
    "ensemble run --route top-1",
    "sample run --prompt one --prompt two -n 2 --steps 2 --out samples",
    "evaluate run -n 20 --steps 2 --route top-1",
    "prepare digits[600:800] --onto run/data",
    "partition run/data-2 --onto run/partition",
    "plan run/data-2 --onto run/orders --images 320",
    f"train run/orders-2/00.json --out experts/00-2 {ON}",
    "admit experts/00-2 --out run",
    f"router run {ON}",
    "plan run --reissue 1 --images 320",
    f"train run/orders-3/01.json --out experts/01-2 {ON}",
    "admit experts/01-2 --out run",
    "ensemble run --remove 0",
    "ensemble run --rollback 10",
    "evaluate run -n 20 --steps 2 --route top-1",
]
ONE_DAY = [
    "plan run --reissue 1 --images 320",
    f"train run/orders-2/01.json --out experts/01 {ON}",
    "admit experts/01 --out run",
    "ensemble run --route top-1",
    "sample run --prompt one -n 2 --steps 2 --out samples",
]


def test_killed_now_and_then(tiny_demo: Path, tmp_path: Path) -> None:
    unbroken = tmp_path / "unbroken"
    shutil.copytree(tiny_demo, unbroken / "run", ignore=shutil.ignore_patterns("islands", "samples"))
    live(ONE_DAY, unbroken, kills=1)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_killed_a_hundred_times(tmp_path: Path) -> None:
    unbroken = tmp_path / "unbroken"
    unbroken.mkdir()
    live(LIFE, unbroken, kills=5)  # of 22 commands each


def live(commands: Sequence[str], unbroken: Path, kills: int) -> None:
    """Give commands to two runs: an unbroken one, and one where each is killed some times before it is let finish.

    They must be the same after every command. A command that is done before it can be killed is given once more to the
    run as it was. A good part of those that were killed must have had something half done.
    """
    broken, saved = unbroken.with_name("broken"), unbroken.with_name("saved")
    shutil.copytree(unbroken, broken)
    numbers, disturbed = random.Random(kills), 0
    for command in commands:
        before, words = names(unbroken), command.split()
        shutil.copytree(broken, saved)
        duration = finish(words, unbroken)
        killed = 0
        while killed < kills:
            if kill(words, broken, duration, numbers):
                killed += 1
                disturbed += names(broken) not in (before, names(unbroken))
            else:
                assert names(broken) == names(unbroken), f"lost or left behind after: atoll {command}"
                shutil.rmtree(broken)
                shutil.copytree(saved, broken)
        finish(words, broken)
        assert names(broken) == names(unbroken), f"lost or left behind after: atoll {command}"
        shutil.rmtree(saved)
    assert contents(broken) == contents(unbroken)
    assert disturbed >= kills * len(commands) // 5, f"only {disturbed} were killed in the midst of their work"
