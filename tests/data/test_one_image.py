"""The way of an image from its file to the training loop, followed function by function."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import Tensor

import atoll
from atoll.data.config import PrepareConfig
from atoll.data.dataset import LatentDataset
from atoll.data.prepare import prepare
from atoll.data.sources import Example
from atoll.data.space import LatentConfig
from atoll.partition.methods import PartitionConfig
from atoll.partition.stage import partition
from image_forms import folder, pictures

OURS = f"{Path(atoll.__file__).parent}/"
PAGE = Path(__file__).resolve().parents[2] / "docs" / "concepts.md"
# networks, how files are written, and pictures for people
ASIDE = ("models/", "artifacts/", "partition/report.py", "data/contact_sheet.py")


def holds_images(value: Any) -> bool:
    """Whether a value is an image or several: encoded bytes, pixels, latents."""
    if isinstance(value, Mapping):
        return any(map(holds_images, value.values()))
    if isinstance(value, tuple):
        return any(map(holds_images, value))
    if isinstance(value, bytes):
        return value.startswith(b"\x89PNG")
    return isinstance(value, Example) or (isinstance(value, np.ndarray | Tensor) and value.ndim >= 3)


@contextmanager
def followed(files: dict[str, None]) -> Iterator[None]:
    """Adds the files of ours with a function that is given an image or returns one, in the order of the first time."""

    def see(frame: FrameType, event: str, value: Any) -> None:
        name = frame.f_code.co_filename.removeprefix(OURS)
        if name[0] == "/" or name[0] == "<" or name in files or name.startswith(ASIDE) or event.startswith("c_"):
            return
        given = frame.f_locals.values() if event == "call" else [value]
        if any(map(holds_images, list(given))):
            files[name] = None

    sys.setprofile(see)
    try:
        yield
    finally:
        sys.setprofile(None)


def test_an_image_passes_at_most_eight_files(tmp_path: Path) -> None:
    """docs/concepts.md shows the table that this prints."""
    files: dict[str, None] = {}
    place, config = folder(tmp_path / "images", pictures(60)), PrepareConfig(size=16, features="pixels")
    with followed(files):
        data = prepare(place, tmp_path / "data", config)
        cut = partition(tmp_path / "data", tmp_path / "partition", PartitionConfig(clusters=2))
        shards = [cut.file(name) for name in cut.names("clusters/00/train-")]
        samples = LatentDataset.open(shards, LatentConfig.model_validate(data.config["latent"]))
        latents = samples.latents(torch.arange(4))  # what a batch of the training loop begins with
    assert latents.shape == (4, 3, 16, 16)
    print("\n".join(f"| {number} | `{name}` |" for number, name in enumerate(files, 1)))
    assert len(files) <= 8
    rows = [line.split("`")[1] for line in PAGE.read_text().splitlines() if line.startswith("| ") and ".py`" in line]
    assert sorted(rows) == sorted(files)
