"""kill -9 at random moments of every verb that writes: nothing is lost, and after the next command nothing left behind."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

from killed import contents, finish, kill, names

TINY = "--set training.batch=32 --set training.warmup_images=64 --set training.ema_images=64"
ON = "--device cpu --checkpoint-seconds 0"
# the life of a run with late data, in the verbs' own words; each can be given twice and means the same
STORY = [
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
    "ensemble run --rollback 12",
    "evaluate run -n 20 --steps 2 --route top-1",
]
QUICK = [5, 6, 12, 19]  # admit, router, plan --onto, ensemble


@pytest.mark.parametrize(
    ("kills", "verbs"),
    [
        pytest.param(2, QUICK, id="few"),
        pytest.param(5, range(len(STORY)), id="110", marks=[pytest.mark.slow, pytest.mark.timeout(1800)]),
    ],
)
def test_killed_anywhere_and_told_again_it_is_as_if_nothing_had_happened(
    kills: int, verbs: list[int], tmp_path: Path
) -> None:
    """Two runs side by side: an unbroken one, and one in which each command is killed before it is let finish."""
    numbers = random.Random(kills)
    unbroken, broken = tmp_path / "unbroken", tmp_path / "broken"
    unbroken.mkdir()
    killed, disturbed = 0, 0
    for place in range(max(verbs) + 1):
        command = STORY[place].replace("--prompt one", "--prompt a_handwritten_one").split()
        command = [word.replace("a_handwritten_", "a handwritten ") for word in command]
        if place == min(verbs):
            shutil.copytree(unbroken, broken)
        before = names(unbroken)
        duration = finish(command, unbroken)
        if place < min(verbs):
            continue
        for _ in range(kills if place in verbs else 0):
            if not kill(command, broken, duration, numbers):
                continue
            killed += 1
            disturbed += names(broken) not in (before, names(unbroken))
        finish(command, broken)
        assert names(broken) == names(unbroken), f"left behind or lost after: {STORY[place]}"
    assert contents(broken) == contents(unbroken)
    assert killed >= kills * len(verbs) // 2, "most were done before they could be killed"
    assert disturbed >= killed // 5, "hardly any was killed in the midst of its work"
