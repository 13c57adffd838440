"""The story of late data in docs/data.md, as a list of commands: told with small budgets, or as it stands there."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from contextlib import chdir
from pathlib import Path

from atoll.cli import main
from pages import DOCS

TINY = "--set training.batch=32 --set training.warmup_images=64 --set training.ema_images=64 --set network.width=32"
TINY += " --set network.depth=2 --set acceptance.max_ratio_to_gaussian=1000"


def story() -> list[str]:
    """Every command of the chapter, in order."""
    chapter = (DOCS / "data.md").read_text().split("\n## Late data")[1].split("\n## ")[0]
    blocks = chapter.split("```sh\n")[1:]
    return [line for block in blocks for line in block.split("```")[0].splitlines()]


def small(line: str) -> list[str]:
    """A command of the story with a budget of a moment."""
    words = shlex.split(line)[1:]
    if words[0] == "plan" and "--images" in words:
        words[words.index("--images") + 1] = "320"
    elif words[0] == "plan":
        words += ["--images", "640", *TINY.split()]
    elif words[0] == "router":
        words += ["--set", "training.images=640", "--device", "cpu"]
    elif words[0] == "train":
        words += ["--device", "cpu"]
    elif words[0] == "evaluate":
        words += ["-n", "20", "--steps", "2"]
    return words


def tell(commands: Sequence[Sequence[str]], place: Path) -> None:
    """Give these commands in a folder."""
    place.mkdir(exist_ok=True)
    with chdir(place):
        for words in commands:
            main(list(words))


def tell_small(place: Path) -> None:
    tell([small(line) for line in story()], place)
