"""clusters/NN/: every cluster's own shards, so that an island fetches its cluster and nothing else.

    clusters/03/train-00000.safetensors        latents, labels, text as in data/; no features
    clusters/03/validation-00000.safetensors

Rows are in a random order that follows from the seed. The holdout split is in none of them: it never leaves data/.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ..artifacts import Artifact, FileEntry, link
from ..data.index import Index
from ..data.progress import Progress
from ..data.shards import (
    TEXT_FIELDS,
    data_shards,
    join_shards,
    pack_captions,
    read_shard,
    unpack_captions,
    write_shard,
)
from ..executor import Executor
from .methods import PartitionConfig

CLUSTERS = "clusters"


@dataclass(frozen=True)
class ShardTask:
    """One shard of a cluster to write: rows int64 [n] of shards of data/."""

    path: Path
    parts: tuple[tuple[tuple[Path, Path], np.ndarray], ...]
    seed: int


def write_clusters(
    folder: Path,
    data: Artifact,
    index: Index,
    clusters: np.ndarray,
    new: np.ndarray,
    old: Artifact | None,
    config: PartitionConfig,
    executor: Executor,
    progress: Progress,
) -> dict[str, FileEntry]:
    """Write the shards of all clusters below `folder`; what a manifest lists of them, by name.

    clusters int64 [N]; new bool [N]: the samples to write. Those of an `old` partition are linked from there, under
    their old names, so that an island that has them fetches only the new ones.
    """
    kept = [] if old is None else old.names(f"{CLUSTERS}/")
    written = {}
    for name in kept:
        assert old is not None
        link(old.file(name), folder / name)
        written[name] = old.manifest.files[name]
    shards = data_shards(data)
    shard, row = index.places

    def tasks() -> Iterator[ShardTask]:
        for k, split in product(range(config.clusters), ("train", "validation")):
            prefix = f"{CLUSTERS}/{k:02d}/{split}-"
            first = sum(name.startswith(prefix) for name in kept)
            member = np.flatnonzero(new & (clusters == k) & (index.splits == split))
            member = np.random.Generator(np.random.Philox([config.seed, k, first])).permutation(member)
            for number, start in enumerate(range(0, len(member), config.shard_rows), first):
                part = member[start : start + config.shard_rows]
                places = [(shards[s], np.sort(row[part[shard[part] == s]])) for s in np.unique(shard[part])]
                yield ShardTask(folder / f"{prefix}{number:05d}.safetensors", tuple(places), config.seed + number)

    done, todo = 0, int((new & (index.splits != "holdout")).sum())
    for _, (name, entry, rows) in executor.map(write_cluster_shard, tasks()):
        written[f"{CLUSTERS}/{name}"] = entry
        done += rows
        progress("writing clusters", done, todo)
    return written


def write_cluster_shard(task: ShardTask) -> tuple[str, FileEntry, int]:
    """Write one shard; its name below clusters/, what the manifest lists of it, and its rows."""
    whole = join_shards([rows_of(read_shard(*paths), torch.from_numpy(rows)) for paths, rows in task.parts])
    count = len(whole["labels"])
    shuffled = rows_of(whole, torch.randperm(count, generator=torch.Generator().manual_seed(task.seed)))
    return f"{task.path.parent.name}/{task.path.name}", write_shard(task.path, shuffled), count


def rows_of(shard: dict[str, Tensor], rows: Tensor) -> dict[str, Tensor]:
    """Some samples of a shard, with the text rows of just these."""
    part = {name: shard[name][rows] for name in ("latents", "labels")}
    if "captions" in shard:
        ends, counts = shard["captions"].tolist(), shard["captions"].diff()[rows]
        text = [caption for row in rows.tolist() for caption in range(ends[row], ends[row + 1])]
        part["captions"] = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        part |= {name: shard[name][text] for name in TEXT_FIELDS if name in shard}
        if "caption_text" in shard:
            part |= pack_captions(unpack_captions(shard, text))
    return part
