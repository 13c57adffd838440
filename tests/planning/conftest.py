"""A run with data and a partition, for all tests of this folder."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from atoll.data.prepare import prepare
from atoll.partition.stage import partition


@pytest.fixture(scope="session")
def _prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = Path(tmp_path_factory.mktemp("run"))
    prepare("digits", run / "data")
    partition(run / "data", run / "partition")
    return run


@pytest.fixture
def run(_prepared: Path, tmp_path: Path) -> Path:
    """A copy to write orders into."""
    shutil.copytree(_prepared, tmp_path / "run")
    return tmp_path / "run"
