"""Encode one unit of a source: read, decode, hash and encode its images, and write its shard. A worker runs this.

shard-00012.safetensors       latents and features, as they stay
state/00012.parquet           a row for each of its images, for the index
state/00012.skipped.jsonl     what could not be used, and why
state/00012.json              written last: this unit is done
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import torch.nn.functional as F
from torch import Tensor

from ..artifacts import STATE, FileEntry, canonical_json, write_atomic
from ..models.autoencoders import load_autoencoder
from ..models.feature_extractors import load_extractor
from .images import BadImage, to_pixels
from .index import split_of
from .shards import write_shard
from .sources import END, Item, Skipped, Source
from .space import TextConfig
from .text import split_words

FEWEST, MOST, UNITS = 64, 4096, 64  # rows of a unit, at least and at most; units of a small source
ROWS = pa.schema(
    [
        ("id", pa.binary(32)),
        ("captions", pa.list_(pa.string())),
        ("label", pa.int32()),
        ("split", pa.string()),
        ("preview", pa.binary()),  # of some rows: the image at the latents' size, uint8 [C, H, W]
    ]
)


@dataclass(frozen=True)
class EncodeConfig:
    """How a worker turns images into tensors; equal for all units."""

    size: int
    channels: int
    smallest: int
    autoencoder: str
    features: str
    batch: int
    threads: int
    device: str
    validation: float
    holdout: float
    previews: float  # fraction of the images that the preview map is fitted to
    text: TextConfig | None  # of the older data, with --onto: captions with other words are skipped
    labels: int | None  # with --onto: how many classes there are


@dataclass(frozen=True)
class UnitTask:
    """Items in bytes start : stop of a stored listing, to be encoded into `folder` as shard `number`."""

    source: Source
    listing: Path
    start: int
    stop: int
    folder: Path
    number: int
    config: EncodeConfig

    def path(self, ending: str) -> Path:
        return self.folder / STATE / f"{self.number:05d}{ending}"


@dataclass(frozen=True)
class UnitResult:
    """What the marker of a finished unit records."""

    rows: int
    shard: FileEntry | None  # None: no image could be used
    words: tuple[str, ...]  # all words of its captions, sorted
    longest: int  # words of the longest caption; 0: there are no captions

    @staticmethod
    def read(marker: Path) -> UnitResult:
        fields = json.loads(marker.read_bytes())
        shard = None if fields["shard"] is None else FileEntry.model_validate(fields["shard"])
        return UnitResult(fields["rows"], shard, tuple(fields["words"]), fields["longest"])


def row_count(item: Item) -> int:
    """Images in an item, as far as the listing shows."""
    return 1 if item.stop is None else MOST if item.stop == END else item.stop - item.start


def units_of(items: Sequence[Item]) -> Iterator[Sequence[Item]]:
    """Items in units of about 1/64 of all rows, from 64 to 4,096. They follow from the listing alone."""
    wanted = min(MOST, max(FEWEST, -(-sum(map(row_count, items)) // UNITS)))
    start = rows = 0
    for place, item in enumerate(items):
        if rows and (rows >= wanted or rows + row_count(item) > MOST):
            yield items[start:place]
            start, rows = place, 0
        rows += row_count(item)
    if rows:
        yield items[start:]


def encode_unit(task: UnitTask) -> int:
    """Encode one unit, unless an earlier run has finished it; how many images it holds."""
    marker = task.path(".json")
    if marker.exists():
        return UnitResult.read(marker).rows
    config, skipped = task.config, list[Skipped]()
    rows: dict[str, list[object]] = {name: [] for name in ROWS.names}
    tensors: dict[str, list[Tensor]] = {"latents": [], "features": []}
    words, longest = set[str](), 0
    with fixed_threads(config.threads), torch.inference_mode():
        for ids, pixels in batches(read_pixels(task, rows, skipped), config):
            encoded = encode_images(config, pixels)
            for name, parts in tensors.items():
                parts.append(encoded[name][: len(ids)])
            small = downsample(pixels, encoded["latents"])
            rows["preview"] += [
                small[row].tobytes() if drawn(i, config.previews) else None for row, i in enumerate(ids)
            ]
    shard = None
    if rows["id"]:
        whole = {name: torch.cat(parts) for name, parts in tensors.items()}
        shard = write_shard(task.folder / f"shard-{task.number:05d}.safetensors", whole)
    for captions in rows["captions"]:
        assert isinstance(captions, list)
        for found in map(split_words, captions):
            words.update(found)
            longest = max(longest, len(found), 1)
    table = io.BytesIO()
    pq.write_table(pa.table(rows, schema=ROWS), table)
    write_atomic(task.path(".parquet"), table.getvalue())
    write_atomic(task.path(".skipped.jsonl"), b"".join(canonical_json(vars(each)) + b"\n" for each in skipped))
    result = {"rows": len(rows["id"]), "words": sorted(words), "longest": longest}
    write_atomic(marker, canonical_json({**result, "shard": None if shard is None else shard.model_dump()}))
    return len(rows["id"])


def read_pixels(
    task: UnitTask, rows: dict[str, list[object]], skipped: list[Skipped]
) -> Iterator[tuple[bytes, np.ndarray]]:
    """(id, pixels uint8 [C, S, S]) of each usable image of a unit, whose columns are added to `rows`."""
    config = task.config
    with open(task.listing, "rb") as file:
        file.seek(task.start)
        items = map(Item.from_json, file.read(task.stop - task.start).splitlines())
    for found in (found for item in items for found in task.source.read(item)):
        if isinstance(found, Skipped):
            skipped.append(found)
            continue
        digest = found.digest()
        try:
            pixels = to_pixels(found, config.size, config.channels, config.smallest)
        except BadImage as bad:
            skipped.append(Skipped(found.name, digest.hex(), bad.reason, bad.detail))
            continue
        captions = [caption for caption in found.captions if is_encodable(caption, config.text)]
        if len(captions) < len(found.captions):
            skipped.append(Skipped(found.name, digest.hex(), "bad caption: words no network knows"))
        label = found.label
        if label is not None and config.labels is not None and label >= config.labels:
            skipped.append(Skipped(found.name, digest.hex(), "unknown label"))
            label = None
        split = split_of(digest, config.validation, config.holdout)
        for name, value in {"id": digest, "captions": captions, "label": label, "split": split}.items():
            rows[name].append(value)
        yield digest, pixels


def is_encodable(caption: str, text: TextConfig | None) -> bool:
    """Whether networks have a row for each word; text encoders other than `words` take anything."""
    if text is None or text.vocabulary is None:
        return True
    words = split_words(caption)
    return len(words) <= text.length and set(text.vocabulary).issuperset(words)


def batches(
    images: Iterator[tuple[bytes, np.ndarray]], config: EncodeConfig
) -> Iterator[tuple[list[bytes], np.ndarray]]:
    """Ids of at most `batch` images and their pixels uint8 [batch, C, S, S].

    The last batch is filled up with black images: cuDNN plans every convolution anew for every batch size it meets,
    which took a GPU three times as long (docs/log.md).
    """
    while chunk := list(islice(images, config.batch)):
        pixels = np.zeros((config.batch, config.channels, config.size, config.size), np.uint8)
        pixels[: len(chunk)] = [image for _, image in chunk]
        yield [identity for identity, _ in chunk], pixels


def encode_images(config: EncodeConfig, pixels: np.ndarray) -> dict[str, Tensor]:
    """`latents` float32 [B, C, H, W] as the autoencoder gives them and `features` float32 [B, D], on the CPU."""
    # channels last: what convolutions are fastest on, on CPUs and GPUs alike
    images = torch.from_numpy(pixels).to(config.device).contiguous(memory_format=torch.channels_last)
    latents = load_autoencoder(config.autoencoder).encode(images)
    features = load_extractor(config.features, config.device).extract(images)
    return {"latents": latents.float().cpu().contiguous(), "features": features.float().cpu().contiguous()}


def drawn(identity: bytes, fraction: float) -> bool:
    """Whether an image is among a random fraction of all; it depends on nothing but its id."""
    return int.from_bytes(identity[:8], "big") < fraction * 2.0**64


def downsample(pixels: np.ndarray, latents: Tensor) -> np.ndarray:
    """Images uint8 [B, C, S, S] averaged down to the size of their latents [B, c, H, W], uint8."""
    small = F.adaptive_avg_pool2d(torch.from_numpy(pixels).float(), (latents.shape[-2], latents.shape[-1]))
    return small.round().to(torch.uint8).numpy()


@contextmanager
def fixed_threads(count: int) -> Iterator[None]:
    """Compute with `count` threads inside: sums depend on how they are split."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
