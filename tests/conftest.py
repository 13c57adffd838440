"""What every test shares: one thread per process, and the real data beside the repository."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

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
