"""kill -9 at random moments of every verb that writes: nothing is lost, and nothing left after the next command."""

from __future__ import annotations

import random
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from killed import contents, finish, kill, names

TINY = "--set training.batch=32 --set training.warmup_images=64 --set training.ema_images=64"
ON = "--device cpu --checkpoint-seconds 0"
# the life of a run with late data, in the verbs' own words; each can be said twice and means the same
LIFE = [
    "prepare digits[:600] --out run/data",
    "partition run/data -k 2",
    f"plan run/data --mix 1ddpm:1flow --images 640 {TINY} --set acceptance.gaussians=1000",
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
    folders = [tmp_path / "unbroken", tmp_path / "broken"]
    for folder in folders:
        shutil.copytree(tiny_demo, folder / "run", ignore=shutil.ignore_patterns("islands", "samples"))
    assert live(ONE_DAY, *folders, kills=2) >= 5


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_killed_a_hundred_times(tmp_path: Path) -> None:
    folders = [tmp_path / "unbroken", tmp_path / "broken"]
    for folder in folders:
        folder.mkdir()
    assert live(LIFE, *folders, kills=6) >= 100


def live(commands: Sequence[str], unbroken: Path, broken: Path, kills: int) -> int:
    """Give commands to two runs: an unbroken one, and one where each is killed some times before it is let finish.

    They must be the same after every command. How many were killed; a good part of them with something half done.
    """
    numbers, killed, disturbed = random.Random(kills), 0, 0
    for command in commands:
        before, words = names(unbroken), command.split()
        duration = finish(words, unbroken)
        for _ in range(kills):
            if kill(words, broken, duration, numbers):
                killed += 1
                disturbed += names(broken) not in (before, names(unbroken))
        finish(words, broken)
        assert names(broken) == names(unbroken), f"lost or left behind after: atoll {command}"
    assert contents(broken) == contents(unbroken)
    assert disturbed >= killed // 5, f"of {killed} killed only {disturbed} were in the midst of their work"
    return killed
