"""One prepared data set for all tests of this folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from atoll.artifacts import Artifact
from atoll.data.prepare import prepare


@pytest.fixture(scope="session")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return prepare("digits", Path(tmp_path_factory.mktemp("digits")) / "data")
