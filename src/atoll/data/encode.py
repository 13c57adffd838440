"""Encode one unit of a source: read, decode, hash and encode its images, and write its shard. A worker runs this.

shard-00012.safetensors       latents and features, as they stay
state/00012.parquet           a row for each of its images, what was skipped in the metadata; last: the unit is done
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from ..artifacts import STATE, write_atomic
from ..executor import fixed_threads
from ..models.autoencoders import load_autoencoder
from ..models.feature_extractors import load_extractor
from .config import PrepareConfig
from .images import BadImage, identity, to_pixels
from .index import split_of
from .shards import write_shard
from .sources import END, Example, Item, Skipped, Source

FEWEST, MOST, UNITS = 64, 4096, 64  # rows of a unit, at least and at most; units of a small source
ROWS = pa.schema(
    [
        ("name", pa.string()),
        ("id", pa.string()),
        ("captions", pa.list_(pa.string())),
        ("label", pa.int32()),
        ("split", pa.string()),
    ]
)


@dataclass(frozen=True)
class UnitTask:
    """Items to be encoded into `folder` as shard `number`; all defaults of the settings are filled in."""

    source: Source
    items: Sequence[Item]
    folder: Path
    number: int
    config: PrepareConfig
    device: str

    @property
    def shard(self) -> Path:
        return self.folder / f"shard-{self.number:05d}.safetensors"

    @property
    def condition(self) -> Path:
        return self.folder / f"condition-{self.number:05d}.safetensors"

    @property
    def table(self) -> Path:
        return self.folder / STATE / f"{self.number:05d}.parquet"


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
    if task.table.exists():
        return int(pq.read_metadata(task.table).num_rows)
    config, skipped = task.config, list[Skipped]()
    rows: dict[str, list[object]] = {name: [] for name in ROWS.names}
    latents, features = list[Tensor](), list[Tensor]()
    with fixed_threads(config.threads), torch.inference_mode():
        autoencoder, extractor = load_autoencoder(config.autoencoder), load_extractor(str(config.features), task.device)
        for count, images in batches(pixels_of(task, rows, skipped), config, task.device):
            latents.append(autoencoder.encode(images)[:count].float().cpu())
            features.append(extractor.extract(images)[:count].float().cpu())
    if latents:
        write_shard(task.shard, {"latents": torch.cat(latents), "features": torch.cat(features)})
    table, file = pa.table(rows, schema=ROWS), io.BytesIO()
    pq.write_table(table.replace_schema_metadata({"skipped": json.dumps([vars(each) for each in skipped])}), file)
    write_atomic(task.table, file.getvalue())
    return len(table)


def read_unit(task: UnitTask, shard: int) -> tuple[pa.Table, list[Skipped]]:
    """The rows of a finished unit, with `shard` as given and their `row` in it; and what was skipped."""
    table = pq.read_table(task.table)
    skipped = [Skipped(**fields) for fields in json.loads(table.schema.metadata[b"skipped"])]
    table = table.append_column("shard", pa.array(np.full(len(table), shard, np.int32)))
    table = table.append_column("row", pa.array(np.arange(len(table), dtype=np.int32)))
    return table.replace_schema_metadata(), skipped


def pixels_of(task: UnitTask, rows: dict[str, list[object]], skipped: list[Skipped]) -> Iterator[np.ndarray]:
    """uint8 [C, S, S] of each usable image of a unit, whose columns are added to `rows`."""
    config, channels = task.config, task.source.channels
    assert config.size is not None, "filled in"
    assert config.smallest is not None, "filled in"
    for found in (found for item in task.items for found in task.source.read(item)):
        if isinstance(found, Skipped):
            skipped.append(found)
            continue
        skipped += (Skipped(found.name, warning) for warning in found.note.warnings)
        try:
            pixels = to_pixels(found.content, config.size, channels, config.smallest)
        except BadImage as bad:
            skipped.append(Skipped(found.name, bad.reason, bad.detail))
            continue
        add_row(rows, found, config)
        yield pixels


def add_row(rows: dict[str, list[object]], example: Example, config: PrepareConfig) -> None:
    digest = identity(example.content)
    split = split_of(digest, config.validation, config.holdout)
    values = (example.name, digest.hex(), list(example.note.captions), example.note.label, split)
    for column, value in zip(rows.values(), values, strict=True):
        column.append(value)


def batches(images: Iterator[np.ndarray], config: PrepareConfig, device: str) -> Iterator[tuple[int, Tensor]]:
    """How many images there are, at most `batch`, and uint8 [batch, C, S, S] on the device.

    The last batch is filled up with black images: cuDNN plans every convolution anew for every batch size it meets.
    """
    while chunk := list(islice(images, config.batch)):
        pixels = np.zeros((config.batch or len(chunk), *chunk[0].shape), np.uint8)
        pixels[: len(chunk)] = chunk
        # channels last: what convolutions are fastest on, on CPUs and GPUs alike
        yield len(chunk), torch.from_numpy(pixels).to(device).contiguous(memory_format=torch.channels_last)
