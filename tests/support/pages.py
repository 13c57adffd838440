"""The pages of the documentation: the commands and the Python they print."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]


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
