"""`make house` counts what it says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tools"))
from house import code_lines  # noqa: E402

TEXT = '''"""Docstring
of two lines."""

import os  # a comment


def f():
    """One line."""
    # a comment
    return """text
that is no docstring"""
'''


def test_code_has_no_docstrings_comments_and_blanks() -> None:
    assert code_lines(TEXT) == (4, 3)


def test_the_table_is_printed() -> None:
    found = subprocess.run([sys.executable, ROOT / "tools" / "house.py"], capture_output=True, text=True, check=True)
    assert "artifacts" in found.stdout
    assert "src " in found.stdout
