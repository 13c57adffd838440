"""The same images as a folder, as tars, as parquet and as a saved Hugging Face data set."""

from __future__ import annotations

import io
import json
import random
import tarfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from atoll.artifacts import Artifact
from atoll.data.config import PrepareConfig
from atoll.data.dataset import LatentDataset
from hostile_images import encoded, picture

CONFIG = PrepareConfig(size=16, features="pixels")
IMAGE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


@dataclass(frozen=True)
class Item:
    name: str
    content: bytes
    caption: str | None = None
    label: int | None = None


def pictures(count: int, first: int = 0) -> list[Item]:
    """Small pictures with a caption and a label, the same ones every time."""
    words = ("red", "green", "blue")
    return [
        Item(f"{i:03d}.png", encoded(picture(1000 + i, 20, 24), "PNG"), f"a {words[i % 3]} thing", i % 3)
        for i in range(first, first + count)
    ]


def samples_of(data: Artifact) -> LatentDataset:
    return LatentDataset.of(data)


def folder(place: Path, items: Sequence[Item]) -> str:
    place.mkdir(parents=True)
    for number, item in enumerate(items):
        # two files may not differ in their ending only, or they would share their captions
        path = place / f"{number:04d}-{item.name}"
        path.write_bytes(item.content)
        said = {name: value for name, value in (("caption", item.caption), ("label", item.label)) if value is not None}
        if said:
            path.with_suffix(".json").write_text(json.dumps(said))
    return str(place)


def tars(place: Path, items: Sequence[Item], count: int = 3) -> str:
    """Tars as img2dataset lays them out, with its parquet file of statistics beside each."""
    place.mkdir(parents=True)
    for shard in range(count):
        with tarfile.open(place / f"{shard:05d}.tar", "w") as tar:
            for number, item in enumerate(items[shard::count]):
                ending = item.name.partition(".")[2] or "img"
                said = {"key": f"{number:09d}", "status": "success", "caption": item.caption, "label": item.label}
                members = [(ending, item.content), ("json", json.dumps(said).encode())]
                if item.caption is not None:
                    members.insert(1, ("txt", item.caption.encode()))
                for name, content in members:
                    info = tarfile.TarInfo(f"{number:09d}.{name}")
                    info.size = len(content)
                    tar.addfile(info, io.BytesIO(content))
        pq.write_table(pa.table({"key": ["x"], "status": ["success"]}), place / f"{shard:05d}.parquet")
    return str(place)


def table(items: Sequence[Item]) -> pa.Table:
    return pa.table(
        {
            "image": pa.array([{"bytes": i.content, "path": i.name} for i in items], IMAGE),
            "caption": pa.array([i.caption for i in items], pa.string()),
            "label": pa.array([i.label for i in items], pa.int32()),
        }
    )


def parquet(place: Path, items: Sequence[Item]) -> str:
    place.mkdir(parents=True)
    half = len(items) // 2
    pq.write_table(table(items[:half]), place / "train-00000.parquet", row_group_size=17)
    pq.write_table(table(items[half:]), place / "train-00001.parquet")
    return str(place)


def saved_to_disk(place: Path, items: Sequence[Item]) -> str:
    """What `Dataset.save_to_disk` leaves: an arrow stream, and JSON beside it."""
    place.mkdir(parents=True)
    rows = table(items)
    with pa.ipc.new_stream(place / "data-00000-of-00001.arrow", rows.schema) as writer:
        writer.write_table(rows)
    (place / "dataset_info.json").write_text("{}")
    (place / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}))
    return str(place)


FORMS: dict[str, Callable[[Path, Sequence[Item]], str]] = {
    "folder": folder,
    "tars": tars,
    "parquet": parquet,
    "saved": saved_to_disk,
}


def shuffled(items: Sequence[Item], seed: int) -> list[Item]:
    """Other names, another order, the same content."""
    names = [f"{random.Random(seed).random()}.{item.name.rpartition('.')[2]}" for item in items]
    renamed = [Item(name, item.content, item.caption, item.label) for name, item in zip(names, items, strict=True)]
    random.Random(seed).shuffle(renamed)
    return renamed
