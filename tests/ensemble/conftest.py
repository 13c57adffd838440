"""A complete model to change, for the tests of this folder."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest


@pytest.fixture
def run(tiny_demo: Path, tmp_path: Path) -> Path:
    """A model of eight experts in ten versions. Files are links: what is changed must be replaced, not written into."""
    for name in ("data", "partition", "orders", "contributions", "router", "ensemble"):
        shutil.copytree(tiny_demo / name, tmp_path / "run" / name, copy_function=os.link)
    return tmp_path / "run"
