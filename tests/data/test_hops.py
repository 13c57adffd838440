"""How often the bytes of a latent are written and hashed on their way from `prepare` to the first training step."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, NamedTuple

import numpy as np
import pytest
import torch
from PIL import Image

from atoll.artifacts import Artifact, Store
from atoll.artifacts import known_digests as memory
from atoll.data.index import Index
from atoll.data.prepare import PrepareConfig, prepare
from atoll.islands.launch import hand_out
from atoll.islands.train import train
from atoll.partition.config import PartitionConfig
from atoll.partition.stage import partition
from atoll.planning import plan, recipe
from atoll.training.resources import Resources
from image_forms import samples_of

IMAGES, SIZE = 60, 64
STAGES = ("prepare", "partition", "plan", "hand-out", "island")


class Hops(NamedTuple):
    """How often a stage writes latents and hashes them, and how often they are read from the disk for that."""

    written: int
    hashed: int
    read: int


class Hashed:
    """Stands for hashlib.sha256, and keeps what goes into it."""

    all: ClassVar[list[Hashed]] = []
    real = hashlib.sha256

    def __init__(self, data: bytes = b"", *, from_file: bool = False) -> None:
        self._hash, self.content, self.from_file = Hashed.real(), bytearray(), from_file
        Hashed.all.append(self)
        self.update(data)

    def update(self, data: bytes) -> None:
        self.content += data
        self._hash.update(data)

    def digest(self) -> bytes:
        return self._hash.digest()

    def hexdigest(self) -> str:
        return self._hash.hexdigest()


def hashed_file(stream: BinaryIO, name: str) -> Hashed:
    assert name == "sha256"
    return Hashed(stream.read(), from_file=True)


def bytes_written() -> int:
    """By this process so far, through any library: what the kernel has counted."""
    return int(dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())["wchar"])


@contextmanager
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """What is written (bytes) and hashed inside."""
    seen: dict[str, Any] = {}
    before, Hashed.all = bytes_written(), []
    with monkeypatch.context() as patch:
        patch.setattr(hashlib, "sha256", Hashed)
        patch.setattr(hashlib, "file_digest", hashed_file)
        yield seen
    seen.update(written=bytes_written() - before, hashed=Hashed.all)


def blocks(place: Path) -> str:
    """Images of 16 random colors: no two alike, and small as PNG, so that latents are most of what is written."""
    place.mkdir()
    numbers = np.random.default_rng(0)
    for i in range(IMAGES):
        colors = numbers.integers(0, 256, (4, 4, 3), dtype=np.uint8)
        Image.fromarray(colors.repeat(SIZE // 4, 0).repeat(SIZE // 4, 1)).save(place / f"{i}.png")
    return str(place)


def hops(
    folder: Path, monkeypatch: pytest.MonkeyPatch, mix: str | None, between: Callable[[], None]
) -> dict[str, Hops]:
    """What each stage does to the latents of the training samples: to each of them at most so often.

    `between` is called before every stage but the island's, which has a process of its own and knows nothing.
    """
    source, run = blocks(folder / "source"), folder / "run"
    config = recipe("digits")
    training = config.training.model_copy(update={"images": 8, "batch": 8, "warmup_images": 8, "ema_images": 8})
    network = config.network.model_copy(update={"depth": 1, "patch": 16})
    planned = config.model_copy(update={"training": training, "network": network, "objectives": mix})
    islands = []

    def give() -> None:
        islands.extend(hand_out(Store.at(run), f"{k:02d}", folder / f"island-{k}") for k in range(2))

    def learn() -> None:
        for island in islands:
            train(island.order, island.expert, resources=Resources(device="cpu"))

    work: dict[str, Callable[[], object]] = {
        "prepare": lambda: prepare(
            source, run / "data", PrepareConfig(size=SIZE, features="pixels", holdout=0, shard_rows=20)
        ),
        "partition": lambda: partition(run / "data", run / "partition", PartitionConfig(clusters=2)),
        "plan": lambda: plan(run / "data", run / "partition", run / "orders", planned),
        "hand-out": give,
        "island": learn,
    }
    seen = {}
    for stage in STAGES:
        memory.forget() if stage == "island" else between()
        with watched(monkeypatch) as seen[stage]:
            work[stage]()

    data = Artifact.open(run / "data")
    rows, samples = torch.from_numpy(Index.of(data).rows("train")), samples_of(data)
    latents = [latent.numpy().tobytes() for latent in samples.latents(rows)]
    volume = IMAGES * len(latents[0])
    seen["prepare"]["written"] -= IMAGES * 3 * SIZE * SIZE  # the images themselves, between the two passes

    def times(stage: str, *, from_file: bool) -> int:
        hashed = [entry.content for entry in seen[stage]["hashed"] if entry.from_file == from_file]
        most = max(sum(content.count(latent) for content in hashed) for latent in latents)
        # latents not normalized yet are other bytes, but no fewer: they would show here
        assert sum(map(len, hashed)) < (most + 0.5) * volume, stage
        return most

    def of(stage: str) -> Hops:
        read = times(stage, from_file=True)
        return Hops(round(seen[stage]["written"] / volume), times(stage, from_file=False) + read, read)

    return {stage: of(stage) for stage in STAGES}


# written: as the encoder gives them, normalized, and into a cluster;
# hashed: as they are written, and when a process first reads what it did not write
PREPARE, PARTITION, ISLAND = Hops(2, 1, 0), Hops(1, 2, 1), Hops(0, 1, 1)
MIXED = "1ddpm:1flow"  # dealt by how much detail the latents have; where all learn by flow, nobody looks


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc/self/io: NOT TESTED HERE")
@pytest.mark.parametrize(
    ("processes", "mix", "most"),
    [
        ("one", MIXED, [PREPARE, PARTITION, Hops(0, 1, 1), Hops(0, 0, 0), ISLAND]),
        ("each", MIXED, [PREPARE, PARTITION, Hops(0, 1, 1), Hops(0, 1, 1), ISLAND]),
        ("each", None, [PREPARE, PARTITION, Hops(0, 0, 0), Hops(0, 1, 1), ISLAND]),
    ],
)
def test_latents_are_written_and_hashed_no_more_than_this(
    processes: str, mix: str | None, most: list[Hops], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All stages in one process, as the demo has them, or each in its own, as a user calls them."""
    monkeypatch.setattr(memory, "SETTLED_NS", 0)  # as if it all took longer than two seconds
    found = hops(tmp_path, monkeypatch, mix, between=memory.forget if processes == "each" else lambda: None)
    assert found == dict(zip(STAGES, most, strict=True))
    total = Hops(*(sum(column) for column in zip(*found.values(), strict=True)))
    assert total == (Hops(3, 6, 4) if processes == "each" and mix else Hops(3, 5, 3)), "docs/data.md says so"
