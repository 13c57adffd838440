"""assignment.parquet: the cluster of every sample, by id. Joined by id and never by position."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch
from torch import Tensor

from ..artifacts import Artifact, UserError
from ..data.index import Index

ASSIGNMENT = "assignment.parquet"


def write_assignment(path: Path, index: Index, clusters: np.ndarray) -> None:
    table = pa.table({"id": index.table["id"], "cluster": pa.array(clusters, pa.int32())})
    pq.write_table(table, path, compression="zstd")


def assigned_clusters(index: Index, partition: Artifact) -> np.ndarray:
    """The cluster int64 [N] that a partition assigns to every row of a data index; -1 where it assigns none."""
    table = pq.read_table(partition.file(ASSIGNMENT))
    place = pc.index_in(index.table["id"], value_set=table["id"].combine_chunks())
    return np.asarray(table["cluster"].take(place).fill_null(-1).to_numpy(), dtype=np.int64)


def clusters_of(index: Index, partition: Artifact) -> Tensor:
    """The cluster int64 [N] of every row of a data index."""
    clusters = assigned_clusters(index, partition)
    if missing := int((clusters < 0).sum()):
        raise UserError(f"{partition.store}: assigns no cluster to {missing} samples; partition this data again")
    return torch.from_numpy(clusters)
