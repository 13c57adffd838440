"""The pages of the documentation: the commands and the Python they print."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
TINY = "--set network.width=32 --set network.depth=1 --set training.warmup_images=64 --set training.ema_images=64"
QUICK = {
    "prepare": "--features pixels --workers 1 --device cpu --set holdout=0.1",
    "plan": f"--images 320 {TINY} --set acceptance.max_ratio_to_gaussian=1000",
    "train": "--device cpu",
    "router": "--set training.images=320 --set training.warmup_images=64 --device cpu",
    "sample": "-n 2 --steps 2 --device cpu",
    "evaluate": "-n 20 --steps 2 --device cpu",
    "distill": "--set training.images=320 --set training.batch=32 --device cpu",
    "run": "--until plan",
}


def quick(words: list[str]) -> list[str]:
    """The same command with a budget of a moment. What islands have time for is theirs."""
    return words if "--islands" in words else [*words, *shlex.split(QUICK.get(words[0], ""))]


def blocks(page: Path, language: str = r"\w*") -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


def lines(page: Path) -> list[str]:
    """Every `atoll` command in the blocks of a page, as it is printed, without its comment; no line of usage."""
    printed = [line.removeprefix("$ ") for block in blocks(page) for line in block.splitlines()]
    given = [line for line in printed if line.startswith("atoll ") and "[OPTIONS]" not in line]
    return [re.sub(r"\s+# .*$", "", line) for line in given]


def commands(page: Path) -> list[list[str]]:
    """The same as lists of words, without `atoll`."""
    return [shlex.split(line)[1:] for line in lines(page)]
