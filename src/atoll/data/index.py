"""index.parquet: where each sample lies, its captions and label, and which split it belongs to."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property

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
