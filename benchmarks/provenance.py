"""What every record says about its making."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def commit() -> str:
    """Of this tree, short, and whether `src` is still that; a machine without its history is told by ATOLL_COMMIT."""
    if told := os.environ.get("ATOLL_COMMIT"):
        return told
    head = git("rev-parse", "--short", "HEAD")
    return (head or "unknown") + (" with changes" if git("status", "--porcelain", "--", "src") else "")


def git(*words: str) -> str:
    """What it says; nothing where there is no history."""
    command = ["git", "-C", str(ROOT), *words]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
