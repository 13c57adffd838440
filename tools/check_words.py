"""Refuse words that the field has a better one for: `python tools/check_words.py`, part of `make lint`."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FILES = {"src": ["src/*.py", "src/*.html", "src/*.css"], "tests": ["tests/*.py"], "docs": ["*.md", "docs/*.md"]}


def listed(kind: str) -> list[Path]:
    command = ["git", "-C", str(ROOT), "ls-files", *FILES[kind]]
    names = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    return [ROOT / name for name in names if "docs/log.md" not in name]


def found(words: list[dict[str, list[str] | str]]) -> Iterator[str]:
    """`file:line: word: use ...` for every forbidden word."""
    for kind in FILES:
        rules = [(re.compile(rf"\b({w['pattern']})\b", re.I), w["instead"]) for w in words if kind in w["where"]]
        for path in listed(kind):
            for number, line in enumerate(path.read_text().splitlines(), 1):
                for pattern, instead in rules:
                    if (match := pattern.search(line)) is not None:
                        yield f"{path.relative_to(ROOT)}:{number}: {match[0]!r}: use {instead}"


if __name__ == "__main__":
    lines = list(found(tomllib.loads((ROOT / "tools" / "words.toml").read_text())["words"]))
    print(*lines, sep="\n")
    sys.exit(bool(lines))
