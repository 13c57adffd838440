"""assignment.parquet: the cluster of every sample, by id. Joined by id and never by position."""

from __future__ import annotations

import pyarrow.parquet as pq
import torch
from torch import Tensor

from ..artifacts import Artifact, UserError
from ..data.index import Index


def clusters_of(index: Index, partition: Artifact) -> Tensor:
    """The cluster int64 [N] of every row of a data index."""
    table = pq.read_table(partition.file("assignment.parquet"))
    cluster = dict(zip(table["id"].to_pylist(), table["cluster"].to_pylist(), strict=True))
    if missing := [identity for identity in index.ids if identity not in cluster]:
        raise UserError(
            f"{partition.store}: assigns no cluster to {len(missing)} samples of the data, such as {missing[0][:12]}; "
            "partition this data again"
        )
    return torch.tensor([cluster[identity] for identity in index.ids], dtype=torch.int64)
