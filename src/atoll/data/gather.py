"""First half of prepare: read the source, hash and decode every image, and lay it down sorted by id.

Each unit of the source is read by one worker into chunks of bounded size:

    chunks/00003-00000.ids.npy     uint8 [n, 32], sorted
    chunks/00003-00000.pixels.npy  uint8 [n, C, S, S]
    chunks/00003-00000.arrow       captions, label
    chunks/00003.rejects.jsonl     what could not be used, and why
    chunks/00003.json              written last: this unit is done

Ids are hashes, so a range of ids is a random part of the set whose size is known in advance: part b of B takes
the ids in [b, b + 1) / B of the whole range. Its rows lie together in every sorted chunk, so it is put together
from a few slices, and no step ever holds more than a chunk or a shard in memory. `merge.py` keeps the slices few.
"""

from __future__ import annotations

import io
import json
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa

from ..artifacts import canonical_json, write_atomic
from .images import BadImage, to_pixels
from .sources import Example, Skipped, Source
from .units import Unit, read_unit

CHUNK_BYTES = 64 * 2**20  # of pixels; the most a worker holds

CHUNK_SCHEMA = pa.schema([("captions", pa.list_(pa.string())), ("label", pa.int32())])


@dataclass(frozen=True)
class GatherTask:
    """One unit of a source to read into `folder`."""

    source: Source
    unit: Unit
    number: int
    folder: Path
    size: int
    channels: int
    smallest: int


@dataclass
class _Chunk:
    """Rows collected and not yet written."""

    ids: list[bytes] = field(default_factory=list)
    pixels: list[np.ndarray] = field(default_factory=list)
    captions: list[list[str]] = field(default_factory=list)
    labels: list[int | None] = field(default_factory=list)

    def add(self, sample: Example, pixels: np.ndarray) -> None:
        self.ids.append(sample.digest())
        self.pixels.append(pixels)
        self.captions.append(list(sample.captions))
        self.labels.append(sample.label)

    def write(self, stem: Path) -> None:
        order = sorted(range(len(self.ids)), key=self.ids.__getitem__)
        ids = np.frombuffer(b"".join(self.ids[i] for i in order), dtype=np.uint8).reshape(-1, 32)
        write_array(stem.with_suffix(".ids.npy"), ids)
        write_array(stem.with_suffix(".pixels.npy"), np.stack([self.pixels[i] for i in order]))
        table = pa.table(
            {"captions": [self.captions[i] for i in order], "label": [self.labels[i] for i in order]},
            schema=CHUNK_SCHEMA,
        )
        write_table(stem.with_suffix(".arrow"), table)


# Whole files or none: a worker that outlived a killed run may still be writing the same chunk as the next run.


def write_array(path: Path, array: np.ndarray) -> None:
    buffer = io.BytesIO()
    np.save(buffer, array)
    write_atomic(path, buffer.getvalue())


def write_table(path: Path, table: pa.Table) -> None:
    """An arrow file, to be read by memory map."""
    buffer = pa.BufferOutputStream()
    with pa.ipc.new_file(buffer, table.schema) as writer:
        writer.write_table(table)
    write_atomic(path, buffer.getvalue().to_pybytes())


def gather(task: GatherTask) -> int:
    """Read one unit, unless an earlier run has finished it; the number of rows it holds."""
    marker = task.folder / f"{task.number:05d}.json"
    if marker.exists():
        return int(json.loads(marker.read_bytes())["rows"])
    limit = max(1, CHUNK_BYTES // (task.channels * task.size * task.size))
    chunk, chunks, rows = _Chunk(), 0, 0
    rejects: list[Skipped] = []
    for found in read_unit(task.source, task.unit):
        if isinstance(found, Skipped):
            rejects.append(found)
            continue
        try:
            chunk.add(found, to_pixels(found, task.size, task.channels, task.smallest))
        except BadImage as bad:
            rejects.append(Skipped(found.name, found.digest().hex(), bad.reason, bad.detail))
            continue
        if len(chunk.ids) == limit:
            chunk.write(task.folder / f"{task.number:05d}-{chunks:05d}")
            chunk, chunks, rows = _Chunk(), chunks + 1, rows + limit
    if chunk.ids:
        chunk.write(task.folder / f"{task.number:05d}-{chunks:05d}")
        chunks, rows = chunks + 1, rows + len(chunk.ids)
    lines = b"".join(canonical_json(vars(reject)) + b"\n" for reject in rejects)
    write_atomic(task.folder / f"{task.number:05d}.rejects.jsonl", lines)
    write_atomic(marker, canonical_json({"rows": rows, "chunks": chunks}))
    return rows


def chunk_stems(folder: Path) -> list[Path]:
    """The chunks of every finished unit."""
    return sorted(path.with_name(path.name.removesuffix(".ids.npy")) for path in folder.glob("*.ids.npy"))


def read_rejects(folder: Path) -> Iterator[Skipped]:
    for path in sorted(folder.glob("*.rejects.jsonl")):
        for line in path.read_text().splitlines():
            yield Skipped(**json.loads(line))


def read_table(path: Path) -> pa.Table:
    """An arrow file, by memory map."""
    with pa.memory_map(str(path)) as file:
        return pa.ipc.open_file(file).read_all()


def read_rows(path: Path, start: int, stop: int) -> pa.Table:
    """Rows start : stop of an arrow file whose batches are equally long, the last one perhaps shorter."""
    with pa.memory_map(str(path)) as file:
        reader = pa.ipc.open_file(file)
        length = reader.get_batch(0).num_rows
        first, end = start // length, -(-stop // length)
        batches = [reader.get_batch(number) for number in range(first, end)]
        return pa.Table.from_batches(batches).slice(start - first * length, stop - start)


@dataclass(frozen=True)
class Slice:
    """Rows start : stop of one chunk."""

    stem: Path
    start: int
    stop: int


def slices_of_range(stems: Sequence[Path], number: int, ranges: int) -> list[Slice]:
    """Where the rows of one of `ranges` equal ranges of ids lie."""
    # the smallest and the first too large id of range b, by their first eight bytes: ceil(b 2^64 / ranges)
    edges = [-(-b * 2**64 // ranges) for b in (number, number + 1)]
    result = []
    for stem in stems:
        ids = np.load(stem.with_suffix(".ids.npy"), mmap_mode="r")
        start, stop = (bisect_left(ids, edge, key=first_eight_bytes) for edge in edges)
        if start < stop:
            result.append(Slice(stem, start, stop))
    return result


def first_eight_bytes(identity: np.ndarray) -> int:
    return int.from_bytes(identity[:8].tobytes(), "big")


@dataclass(frozen=True)
class Gathered:
    """The samples of one range of ids: repeats united, in id order."""

    ids: list[bytes]
    pixels: np.ndarray  # uint8 [N, C, S, S]
    captions: list[list[str]]
    labels: list[int | None]
    conflicts: list[bytes]  # ids whose repeats disagree on the label; their label is None

    def without(self, ids: set[bytes]) -> Gathered:
        """The samples whose id is not among these."""
        if not ids:
            return self
        rows = [row for row, identity in enumerate(self.ids) if identity not in ids]
        return Gathered(
            ids=[self.ids[row] for row in rows],
            pixels=self.pixels[rows],
            captions=[self.captions[row] for row in rows],
            labels=[self.labels[row] for row in rows],
            conflicts=[identity for identity in self.conflicts if identity not in ids],
        )


def unite(slices: Sequence[Slice], image_shape: tuple[int, int, int]) -> Gathered:
    """Read the slices, put them in id order, and make one sample of repeats.

    Captions of repeats are united and sorted, so that the order of files does not matter; labels that disagree
    are dropped and reported.
    """
    places: dict[bytes, tuple[int, int]] = {}
    captions: dict[bytes, set[str]] = {}
    labels: dict[bytes, set[int]] = {}
    for number, part in enumerate(slices):
        ids = np.load(part.stem.with_suffix(".ids.npy"), mmap_mode="r")[part.start : part.stop]
        table = read_rows(part.stem.with_suffix(".arrow"), part.start, part.stop)
        for row, (identity, texts, label) in enumerate(
            zip(map(bytes, ids), table["captions"].to_pylist(), table["label"].to_pylist(), strict=True)
        ):
            places.setdefault(identity, (number, row))
            captions.setdefault(identity, set()).update(texts)
            labels.setdefault(identity, set()).update([] if label is None else [label])
    order = sorted(places)
    arrays = [np.load(part.stem.with_suffix(".pixels.npy"), mmap_mode="r")[part.start : part.stop] for part in slices]
    pixels = np.empty((len(order), *image_shape), np.uint8)
    for row, identity in enumerate(order):
        number, place = places[identity]
        pixels[row] = arrays[number][place]
    return Gathered(
        ids=order,
        pixels=pixels,
        captions=[sorted(captions[i]) for i in order],
        labels=[next(iter(labels[i])) if len(labels[i]) == 1 else None for i in order],
        conflicts=[i for i in order if len(labels[i]) > 1],
    )
