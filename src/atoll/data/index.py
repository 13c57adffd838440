"""index.parquet: where each sample lies, its captions and label, and which split it belongs to."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ..artifacts import Artifact

SPLITS = ("train", "validation", "holdout")

SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("shard", pa.int32()),
        ("row", pa.int32()),
        ("captions", pa.list_(pa.string())),
        ("label", pa.int32()),
        ("split", pa.string()),
    ]
)


def split_of(identity: bytes, validation: float, holdout: float) -> str:
    """The split of a sample: a hash of its id, so it stays the same whatever is added to the set later."""
    u = int.from_bytes(hashlib.sha256(b"split:" + identity).digest()[:8], "big") / 2.0**64
    if u < holdout:
        return "holdout"
    return "validation" if u < holdout + validation else "train"


@dataclass(frozen=True)
class Index:
    """The columns of an index, in listing order; row i of `table` is row i of the data's LatentDataset."""

    table: pa.Table

    @staticmethod
    def of(data: Artifact) -> Index:
        return Index(pq.read_table(data.file("index.parquet")))

    def __len__(self) -> int:
        return int(self.table.num_rows)

    @cached_property
    def ids(self) -> list[str]:
        return list(self.table["id"].to_pylist())

    @cached_property
    def captions(self) -> list[list[str]]:
        return list(self.table["captions"].to_pylist())

    def captions_of(self, rows: np.ndarray) -> list[list[str]]:
        """The captions of some rows, without reading those of all."""
        return list(self.table["captions"].take(pa.array(rows)).to_pylist())

    @cached_property
    def labels(self) -> np.ndarray:
        """int64 [N], -1 where there is none."""
        return np.asarray(self.table["label"].fill_null(-1).to_numpy(), dtype=np.int64)

    @cached_property
    def splits(self) -> np.ndarray:
        """Names of splits [N]."""
        return np.asarray(self.table["split"].to_pylist())

    @property
    def places(self) -> tuple[np.ndarray, np.ndarray]:
        """(shard int64 [N], row in that shard int64 [N])."""
        return self.table["shard"].to_numpy().astype(np.int64), self.table["row"].to_numpy().astype(np.int64)

    def rows(self, split: str) -> np.ndarray:
        """Rows int64 of one split, in listing order, which may follow classes."""
        return np.flatnonzero(self.splits == split)

    def shuffled(self, *splits: str, seed: int = 0) -> np.ndarray:
        """Rows int64 of these splits in a random order, so that the first n are a random sample."""
        rows = np.flatnonzero(np.isin(self.splits, splits))
        return np.random.Generator(np.random.Philox(seed)).permutation(rows)


@dataclass(frozen=True)
class Repeats:
    """Which rows of some units show an image that came before; rows are counted through the older data and the units.

    The first in listing order stays. Captions of its repeats are joined to its own; labels that differ are dropped.
    """

    known: int  # rows of the older data, which come first
    first: np.ndarray  # int64 [N]: the row that stays
    labels: np.ndarray  # int64 [N] of the rows that stay, -1: none
    captions: dict[int, list[str]]  # of repeats, by the row that stays
    conflicts: list[int]  # rows that stay, whose repeats have another label

    @staticmethod
    def among(units: Sequence[Path], older: Index | None) -> Repeats:
        """Repeats among the rows of these units (parquet files), and of the older data."""
        known = np.zeros((0, 32), np.uint8) if older is None else as_bytes(map(bytes.fromhex, older.ids))
        parts = [pq.read_table(unit, columns=["id", "label"]) for unit in units]
        ids = np.concatenate([known, *(as_bytes(part["id"].to_pylist()) for part in parts)])
        labels = np.full(len(ids), -1, dtype=np.int64)
        labels[len(known) :] = np.concatenate([part["label"].fill_null(-1).to_numpy() for part in parts])
        found = Repeats(len(known), first_rows(ids), labels, {}, [])
        repeats = np.flatnonzero((found.first != np.arange(len(ids))) & (found.first >= found.known))
        start = found.known
        for unit, part in zip(units, parts, strict=True):
            here = repeats[(repeats >= start) & (repeats < start + len(part))]
            if len(here):
                captions = pq.read_table(unit, columns=["captions"])["captions"].take(pa.array(here - start))
                for row, texts in zip(here.tolist(), captions.to_pylist(), strict=True):
                    found._join(row, texts)
            start += len(part)
        labels[found.conflicts] = -1
        return found

    def _join(self, row: int, captions: list[str]) -> None:
        stays = int(self.first[row])
        self.captions.setdefault(stays, []).extend(captions)
        if self.labels[stays] < 0:
            self.labels[stays] = self.labels[row]
        elif 0 <= self.labels[row] != self.labels[stays] and stays not in self.conflicts:
            self.conflicts.append(stays)

    def table(self, unit: Path, start: int) -> pa.Table:
        """The rows of a unit from row `start` on, with joined `captions`, final `label`, and `kept` bool."""
        table = pq.read_table(unit)
        rows = np.arange(start, start + len(table))
        kept = self.first[rows] == rows
        captions = [
            list(dict.fromkeys([*own, *self.captions.get(row, [])])) if stays else []
            for row, own, stays in zip(rows.tolist(), table["captions"].to_pylist(), kept, strict=True)
        ]
        labels = pa.array(np.where(kept, self.labels[rows], -1), mask=~kept | (self.labels[rows] < 0), type=pa.int32())
        columns = {"captions": pa.array(captions, pa.list_(pa.string())), "label": labels}
        for name, values in columns.items():
            table = table.set_column(table.schema.get_field_index(name), name, values)
        return table.append_column("kept", pa.array(kept))


def as_bytes(ids: Iterable[bytes]) -> np.ndarray:
    """Ids as uint8 [N, 32]."""
    return np.frombuffer(b"".join(ids), dtype=np.uint8).reshape(-1, 32)


def first_rows(ids: np.ndarray) -> np.ndarray:
    """For each of the ids uint8 [N, 32] the first row int64 [N] with the same id."""
    if len(ids) == 0:
        return np.zeros(0, dtype=np.int64)
    # an id as four numbers, the first the most significant; lexsort is stable and takes the most significant last
    order = np.lexsort(np.ascontiguousarray(ids).view(">u8").T[::-1])
    changes = (ids[order[1:]] != ids[order[:-1]]).any(1)
    group = np.concatenate([[0], np.cumsum(changes)])
    first = np.empty(len(ids), dtype=np.int64)
    first[order] = order[np.concatenate([[0], 1 + np.flatnonzero(changes)])][group]
    return first
