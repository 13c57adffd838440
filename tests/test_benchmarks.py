"""The scripts in benchmarks/ import."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))


@pytest.mark.parametrize("name", sorted(path.stem for path in (ROOT / "benchmarks").glob("*.py")))
def test_every_benchmark_can_be_begun(name: str) -> None:
    """Some wait for a card, or take an hour: what they take from each other is there."""
    importlib.import_module(name)
