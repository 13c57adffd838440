"""clusters/NN/: every cluster's own shards, so that an island fetches its cluster and nothing else.

    clusters/03/train-00000.safetensors        latents, labels, text; no features
    clusters/03/validation-00000.safetensors
    clusters/03/index.parquet                  id, split, shard, row, captions, label

The holdout split is in none of them: it never leaves data/.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from safetensors.torch import load_file
from torch import Tensor

from ..artifacts import Artifact, FileEntry, Store, UserError, link
from ..data.index import Index
from ..data.progress import Progress
from ..data.shards import TEXT_FIELDS, join_shards, pack_captions, read_shard, unpack_captions, write_shard_to_list
from .config import PartitionConfig

CLUSTERS = "clusters"

INDEX_SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("split", pa.string()),
        ("shard", pa.string()),
        ("row", pa.int32()),
        ("captions", pa.list_(pa.string())),
        ("label", pa.int32()),
    ]
)


@dataclass
class _Writer:
    """One split of one cluster: rows wait here until they fill a shard. Shards before `first` are there already."""

    folder: Path
    split: str
    shard_rows: int
    first: int
    files: list[FileEntry] = field(default_factory=list)
    waiting: list[dict[str, Tensor]] = field(default_factory=list)

    def add(self, part: dict[str, Tensor]) -> None:
        while len(part["labels"]):
            room = self.shard_rows - sum(len(p["labels"]) for p in self.waiting)
            taken = min(room, len(part["labels"]))
            self.waiting.append(rows_of(part, torch.arange(taken)))
            part = rows_of(part, torch.arange(taken, len(part["labels"])))
            if taken == room:
                self.flush()

    def flush(self) -> None:
        if self.waiting:
            path = self.folder / self.name(len(self.files))
            self.files.append(write_shard_to_list(path, join_shards(self.waiting)))
            self.waiting = []

    def name(self, number: int) -> str:
        return f"{self.split}-{self.first + number:05d}.safetensors"

    def places(self, count: int) -> tuple[list[str], np.ndarray]:
        """Shard names and rows of the first `count` samples given."""
        shards, rows = np.divmod(np.arange(count), self.shard_rows)
        return [self.name(number) for number in shards.tolist()], rows


def rows_of(shard: dict[str, Tensor], rows: Tensor) -> dict[str, Tensor]:
    """Some samples of a shard, with the text rows of just these."""
    part = {name: shard[name][rows] for name in ("latents", "labels")}
    if "captions" in shard:
        first, end = shard["captions"][rows], shard["captions"][rows + 1]
        counts = end - first
        # text rows of sample i: first[i] .. end[i] - 1, one sample after another
        start = torch.repeat_interleave(first - (counts.cumsum(0) - counts), counts)
        text = start + torch.arange(len(start))
        part["captions"] = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        part |= {name: shard[name][text] for name in TEXT_FIELDS if name in shard}
        if "caption_text" in shard:
            part |= pack_captions(unpack_captions(shard, text.tolist()))
    return part


@dataclass(frozen=True)
class OldPartition:
    """The partition that a newer one is made on top of: same rule, same shards, more of them."""

    artifact: Artifact

    @staticmethod
    def open(place: str | Path | Store, data: Artifact) -> OldPartition:
        artifact = Artifact.open(place, "partition")
        if data.manifest.parents.get("data") != artifact.manifest.parents["data"]:
            raise UserError(
                f"--onto {artifact.store}: {data.store} was not prepared on top of its data; "
                "run `atoll prepare` with --onto first"
            )
        return OldPartition(artifact)

    @property
    def config(self) -> PartitionConfig:
        """Its settings. A cut by label or at random once recorded a bound that it did not keep."""
        kept = {name: value for name, value in self.artifact.config.items() if name != "balance"}
        return PartitionConfig.model_validate(self.artifact.config if kept["by"] == "features" else kept)

    @property
    def rule(self) -> dict[str, Tensor]:
        return load_file(self.artifact.file("centroids.safetensors"))

    def assignment(self, index: Index) -> np.ndarray:
        """Cluster int64 of the old samples, which come first in the newer index."""
        table = pq.read_table(self.artifact.file("assignment.parquet"))
        assert table["id"].equals(index.table["id"].slice(0, len(table))), "the newer data does not begin with the old"
        return np.asarray(table["cluster"].to_numpy(), dtype=np.int64)

    def shards(self, cluster: int, split: str) -> list[str]:
        return self.artifact.names(f"clusters/{cluster:02d}/{split}-")

    def take_over(self, folder: Path) -> dict[str, FileEntry]:
        """Bring the old shards into `folder`, each checked: an island that has them fetches only the new."""
        names = [name for name in self.artifact.names("clusters/") if name.endswith(".safetensors")]
        for name in names:
            link(self.artifact.file(name), folder / name)
        return {name: self.artifact.manifest.files[name] for name in names}

    def index(self, cluster: int) -> pa.Table:
        return pq.read_table(self.artifact.file(f"clusters/{cluster:02d}/index.parquet"))


def write_clusters(
    folder: Path,
    data: Artifact,
    index: Index,
    cluster: np.ndarray,
    config: PartitionConfig,
    old: OldPartition | None,
    progress: Progress,
) -> dict[str, FileEntry]:
    """Deal the samples of `data` out to their clusters, shard by shard, in order. cluster int64 [N].

    The shards go to `folder`/clusters; what a manifest says of them, by name. On top of an older partition only the
    samples that came since are dealt out, into shards after the old ones.
    """
    splits = index.splits
    first = 0 if old is None else pq.read_metadata(old.artifact.file("assignment.parquet")).num_rows
    writers = {
        (k, split): _Writer(
            folder / CLUSTERS / f"{k:02d}", split, config.shard_rows, 0 if old is None else len(old.shards(k, split))
        )
        for k in range(config.clusters)
        for split in ("train", "validation")
    }
    start = 0
    for name in data.names("shards/"):
        shard = read_shard(data.file(name))
        here = slice(start, start + len(shard["labels"]))
        start = here.stop
        if here.stop <= first:
            continue
        assert here.start >= first, "a shard of the newer data holds old samples"
        for (k, split), writer in writers.items():
            rows = np.flatnonzero((cluster[here] == k) & (splits[here] == split))
            writer.add(rows_of(shard, torch.from_numpy(rows)))
        progress("writing clusters", start, len(index))
    for writer in writers.values():
        writer.flush()
    new = np.arange(len(index)) >= first
    for k in range(config.clusters):
        before = None if old is None else old.index(k)
        path = folder / CLUSTERS / f"{k:02d}" / "index.parquet"
        write_cluster_index(path, index, new & (cluster == k), writers, k, before)
    return {
        f"{CLUSTERS}/{k:02d}/{writer.name(number)}": file
        for (k, _), writer in writers.items()
        for number, file in enumerate(writer.files)
    }


def write_cluster_index(
    path: Path,
    index: Index,
    member: np.ndarray,
    writers: dict[tuple[int, str], _Writer],
    k: int,
    before: pa.Table | None,
) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with pq.ParquetWriter(path, INDEX_SCHEMA, compression="zstd") as writer:
        if before is not None:
            writer.write_table(before)
        for split in ("train", "validation"):
            rows = index.table.take(pa.array(np.flatnonzero(member & (index.splits == split))))
            names, places = writers[k, split].places(len(rows))
            columns = {
                "id": rows["id"],
                "split": rows["split"],
                "shard": names,
                "row": pa.array(places, pa.int32()),
                "captions": rows["captions"],
                "label": rows["label"],
            }
            writer.write_table(pa.table(columns, schema=INDEX_SCHEMA))
