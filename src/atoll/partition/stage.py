"""The partition stage: a data artifact is cut into clusters, each with shards of its own."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from pydantic import BaseModel, ConfigDict, Field
from safetensors.torch import save_file
from torch import Tensor

from ..artifacts import Artifact, Draft, Store, UserError, canonical_json, reuse
from ..data.index import SPLITS, Index
from ..data.progress import Progress, silent
from ..data.shards import ShardSet
from ..data.space import LatentSpace
from ..models.autoencoders import load_autoencoder
from .clustering import SAMPLE_PER_CELL, Clustering, cells_for, cluster
from .layout import write_clusters
from .quality import measure, telling_words
from .report import write_report
from .sheets import images_of, write_sheet

KIND = "partition"
SHEET_IMAGES = 40  # five rows; each has to be decoded from its latent
ASSIGN_ROWS = 16_384  # features held in memory at a time


class PartitionConfig(BaseModel):
    """How to cut. `by` label and random are baselines."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    clusters: int = Field(default=8, gt=0)
    by: Literal["features", "label", "random"] = "features"
    balance: float | None = Field(default=2.0, ge=1, description="largest over smallest cluster; None: no bound")
    cells: int = Field(default=1024, gt=0, description="fine centroids; fewer are used for a small set")
    seed: int = Field(default=0, ge=0)
    threads: int = Field(default=1, gt=0, description="faiss threads; part of the result's last bits")
    shard_rows: int = Field(default=4096, gt=0)


def partition(
    data: str | Path | Store,
    out: str | Path | Store,
    config: PartitionConfig = PartitionConfig(),
    *,
    progress: Progress = silent,
) -> Artifact:
    """Cut the data artifact at `data` into clusters and write the partition artifact at `out`.

    Clusters are fitted on the train split; validation and holdout samples are assigned by the same rule.
    """
    parent = Artifact.open(data, "data")
    settings = config.model_dump()
    if (there := reuse(out, KIND, settings, {"data": parent.digest})) is not None:
        return there
    index = Index.of(parent)
    samples = ShardSet([parent.file(name) for name in parent.names("shards/")])
    assert len(index) == len(samples), "index and shards differ in number"
    if config.clusters > len(index.rows("train")):
        raise UserError(
            f"-k {config.clusters}: larger than the {len(index.rows('train'))} training samples of {parent.store}; "
            "use a smaller -k"
        )

    rule, assignment = RULES[config.by](index, samples, config, progress)
    sizes = count_sizes(assignment, index.splits, config.clusters)
    for k, size in enumerate(sizes):
        if size["train"] == 0:
            raise UserError(f"-k {config.clusters}: cluster {k} would have no training samples; use a smaller -k")

    with Draft(out, KIND) as draft:
        save_file(rule, draft.folder / "centroids.safetensors")
        (draft.folder / "sizes.json").write_bytes(canonical_json({"clusters": sizes}) + b"\n")
        write_assignment(draft.folder / "assignment.parquet", index, assignment)
        write_clusters(
            draft.folder / "clusters", parent, index, assignment, config.clusters, config.shard_rows, progress
        )
        space = LatentSpace.model_validate(parent.config["latent"])
        write_sheets(draft.folder / "sheets", index, samples, assignment, config.clusters, space)
        progress("measuring", 0, None)
        quality = measure(index, samples, assignment, sizes, config.seed)
        (draft.folder / "quality.json").write_bytes(canonical_json(quality) + b"\n")
        write_report(
            draft.folder / "partition.html",
            settings=settings,
            data=parent.config,
            sizes=sizes,
            quality=quality,
            words=telling_words(index.captions, assignment, config.clusters),
            sheets=draft.folder / "sheets",
        )
        return draft.commit(config=settings, parents={"data": parent.digest}, licence=parent.manifest.licence)


def by_features(
    index: Index, samples: ShardSet, config: PartitionConfig, progress: Progress
) -> tuple[dict[str, Tensor], np.ndarray]:
    """Two-level k-means. Ids are hashes, so the first training rows are a random sample to fit on."""
    train = index.rows("train")
    cells = cells_for(len(train), config.clusters, config.cells)
    fitted_on = torch.from_numpy(train[: cells * SAMPLE_PER_CELL])
    progress("fitting clusters", 0, None)
    clustering = cluster(
        samples.features(fitted_on).numpy(),
        config.clusters,
        cells=cells,
        seed=config.seed,
        balance=config.balance,
        threads=config.threads,
    )
    assignment = assign_all(clustering, samples, config.threads, progress)
    return {"fine": torch.from_numpy(clustering.fine), "coarse": torch.from_numpy(clustering.coarse)}, assignment


def assign_all(clustering: Clustering, samples: ShardSet, threads: int, progress: Progress) -> np.ndarray:
    """Cluster int64 [N] of every sample."""
    assignment = np.empty(len(samples), dtype=np.int64)
    for start in range(0, len(samples), ASSIGN_ROWS):
        rows = torch.arange(start, min(start + ASSIGN_ROWS, len(samples)))
        assignment[rows.numpy()] = clustering.assign(samples.features(rows).numpy(), threads)[0]
        progress("assigning samples", int(rows[-1]) + 1, len(samples))
    return assignment


def by_label(
    index: Index, samples: ShardSet, config: PartitionConfig, progress: Progress
) -> tuple[dict[str, Tensor], np.ndarray]:
    """Whole classes dealt out to clusters, the largest class first, always to the smallest cluster."""
    labels = index.labels
    if (missing := int((labels < 0).sum())) > 0:
        raise UserError(f"--by label: {missing} of {len(labels)} samples have no label; use --by features")
    counts = np.bincount(labels[index.rows("train")], minlength=labels.max() + 1)
    if (classes := int((counts > 0).sum())) < config.clusters:
        raise UserError(f"-k {config.clusters}: only {classes} labels to deal out with --by label; use a smaller -k")
    mass = np.zeros(config.clusters)
    table = np.zeros(len(counts), dtype=np.int64)
    for label in np.lexsort((np.arange(len(counts)), -counts)):
        table[label] = mass.argmin()
        mass[table[label]] += counts[label]
    return {"labels": torch.from_numpy(table)}, table[labels]


def by_random(
    index: Index, samples: ShardSet, config: PartitionConfig, progress: Progress
) -> tuple[dict[str, Tensor], np.ndarray]:
    """A cluster from the hash of (seed, id): random, yet the same for a sample whatever else is in the set."""
    assignment = np.array([random_cluster(identity, config.seed, config.clusters) for identity in index.ids])
    return {"clusters": torch.tensor([config.clusters])}, assignment


def random_cluster(identity: str, seed: int, clusters: int) -> int:
    digest = hashlib.sha256(f"cluster:{seed}:{identity}".encode()).digest()
    return int.from_bytes(digest[:8], "big") * clusters >> 64


RULES = {"features": by_features, "label": by_label, "random": by_random}


def count_sizes(assignment: np.ndarray, splits: np.ndarray, clusters: int) -> list[dict[str, int]]:
    return [{split: int(((assignment == k) & (splits == split)).sum()) for split in SPLITS} for k in range(clusters)]


def write_assignment(path: Path, index: Index, assignment: np.ndarray) -> None:
    table = pa.table({"id": index.table["id"], "cluster": pa.array(assignment, pa.int32())})
    pq.write_table(table, path, compression="zstd")


def write_sheets(
    folder: Path, index: Index, samples: ShardSet, assignment: np.ndarray, clusters: int, space: LatentSpace
) -> None:
    """One sheet per cluster: its first training samples in id order, which is a random choice."""
    autoencoder = load_autoencoder(space.autoencoder)
    train = index.splits == "train"
    for k in range(clusters):
        rows = np.flatnonzero(train & (assignment == k))[:SHEET_IMAGES]
        write_sheet(folder / f"{k:02d}.png", images_of(samples.latents(torch.from_numpy(rows)), space, autoencoder))
