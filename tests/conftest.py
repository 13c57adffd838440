"""What every test shares: one thread per process, and the real data beside the repository."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch

from late_story import tell_small
from runs import made_once, make_demo, make_planned

SHARED = Path(__file__).resolve().parents[2] / "shared"


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    # xdist runs a process per core; more threads would fight each other and make sums differ
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder with real data and a real autoencoder; tests that need it skip, loudly, without it."""
    if not SHARED.is_dir():
        pytest.skip(f"needs the shared data folder at {SHARED}: NOT TESTED HERE")
    return SHARED


@pytest.fixture(scope="session")
def session_folder(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """One folder for all test processes of a session."""
    base = tmp_path_factory.getbasetemp()
    return base if worker_id == "master" else base.parent


@pytest.fixture(scope="session")
def planned(session_folder: Path) -> Path:
    """A run with data, a partition of three clusters and three tiny orders. Read only."""
    return made_once(session_folder, "planned", make_planned)


@pytest.fixture(scope="session")
def tiny_demo(session_folder: Path) -> Path:
    """An unbroken run of the tiny demo. To be read; running the demo in it again must change nothing."""
    return made_once(session_folder, "demo", make_demo)


@pytest.fixture(scope="session")
def late(session_folder: Path) -> Path:
    """A folder in which the story of late data in docs/data.md has been told with small budgets. Read only."""
    return made_once(session_folder, "late", tell_small)


@pytest.fixture
def run(tiny_demo: Path, tmp_path: Path) -> Path:
    """A model of eight experts in ten versions. Files are links: what is changed must be replaced, not written into."""
    for name in ("data", "partition", "orders", "contributions", "router", "ensemble"):
        shutil.copytree(tiny_demo / name, tmp_path / "run" / name, copy_function=os.link)
    return tmp_path / "run"
