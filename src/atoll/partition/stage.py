"""The partition stage: a data artifact is cut into clusters, each with shards of its own."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ..artifacts import Artifact, ArtifactWriter, Store, UserError, canonical_json, load_if_same
from ..data.classes import class_names
from ..data.dataset import LatentDataset
from ..data.index import SPLITS, Index
from ..data.progress import Progress, silent
from ..data.shards import read_shard
from ..data.space import LatentConfig
from ..executor import Executor
from ..models.autoencoders import load_autoencoder
from ..plugins import loaded_plugins
from .clustering import SAMPLE_PER_CELL, Clustering, cells_for, cluster
from .config import PartitionConfig
from .layout import OldPartition, write_clusters
from .quality import DESCRIPTION, lines_about, main_classes, measure, telling_words
from .report import write_report
from .sheets import images_of, write_sheet

KIND = "partition"
DESCRIBED = 100_000  # training samples whose captions are read for the report
SHEET_IMAGES = 40  # five rows; each has to be decoded from its latent


def partition(
    data: str | Path | Store,
    out: str | Path | Store,
    config: PartitionConfig = PartitionConfig(),
    *,
    onto: str | Path | Store | None = None,
    executor: Executor | None = None,
    progress: Progress = silent,
) -> Artifact:
    """Cut the data artifact at `data` into clusters and write the partition artifact at `out`.

    Clusters are fitted on the train split; validation and holdout samples are assigned by the same rule. With `onto`,
    nothing is fitted: `data` was prepared on top of the data of that older partition, whose clusters stay as they
    are, and only the samples that came since are assigned.
    """
    parent = Artifact.open(data, "data")
    old = None if onto is None else OldPartition.open(onto, parent)
    if old is not None:
        if config != PartitionConfig():
            raise UserError(f"--onto {old.artifact.store}: its own settings hold; leave out all others")
        config = old.config
    settings = config.model_dump()
    parents = {"data": parent.digest} | ({} if old is None else {"partition": old.artifact.digest})
    if (there := load_if_same(out, KIND, settings, parents)) is not None:
        return there
    index = Index.of(parent)
    samples = LatentDataset.of(parent)
    assert len(index) == len(samples), "index and shards differ in number"
    if config.clusters > len(index.rows("train")):
        raise UserError(
            f"-k {config.clusters}: larger than the {len(index.rows('train'))} training samples of {parent.store}; "
            "use a smaller -k"
        )

    with ArtifactWriter(out, KIND) as draft, executor or Executor() as executor:
        rule = RULES[config.by](index, samples, config, progress) if old is None else old.rule
        save_file(rule, draft.folder / "centroids.safetensors")
        if old is None:
            assignment = assign(draft.folder / "centroids.safetensors", parent, index, 0, config, executor, progress)
        else:
            before = old.assignment(index)
            late = assign(
                draft.folder / "centroids.safetensors", parent, index, len(before), config, executor, progress
            )
            assignment = np.concatenate([before, late])
        sizes = count_sizes(assignment, index.splits, config.clusters)
        for k, size in enumerate(sizes):
            if size["train"] == 0:
                raise UserError(f"-k {config.clusters}: cluster {k} would have no training samples; use a smaller -k")
        (draft.folder / "sizes.json").write_bytes(canonical_json({"clusters": sizes}) + b"\n")
        write_assignment(draft.folder / "assignment.parquet", index, assignment)
        written = {} if old is None else old.take_over(draft.folder)
        written |= write_clusters(draft.folder, parent, index, assignment, config, old, progress)
        space = LatentConfig.model_validate(parent.config["latent"])
        write_sheets(draft.folder / "sheets", index, samples, assignment, config.clusters, space)
        progress("measuring", 0, None)
        quality = measure(index, samples, assignment, sizes, config.seed)
        (draft.folder / "quality.json").write_bytes(canonical_json(quality) + b"\n")
        rows = index.rows("train")[:DESCRIBED]
        words = telling_words(index.captions_of(rows), assignment[rows], config.clusters)
        classes = main_classes(index.labels[rows], assignment[rows], config.clusters, class_names(parent))
        told = [{"classes": c, "words": w} for c, w in zip(classes, words, strict=True)]
        (draft.folder / DESCRIPTION).write_bytes(canonical_json({"clusters": told}) + b"\n")
        write_report(
            draft.folder / "partition.html",
            settings=settings,
            data=parent.config,
            sizes=sizes,
            quality=quality,
            told=[lines_about(each) for each in told],
            sheets=draft.folder / "sheets",
        )
        provenance = {"plugins": loaded_plugins()}
        return draft.commit(
            config=settings, parents=parents, license=parent.manifest.license, written=written, provenance=provenance
        )


# A rule is what centroids.safetensors holds: all that is needed to assign any sample, now or later.
Rule = dict[str, Tensor]


def by_features(index: Index, samples: LatentDataset, config: PartitionConfig, progress: Progress) -> Rule:
    """Two-level k-means. Ids are hashes, so training rows at even distances are a random sample to fit on."""
    train = index.rows("train")
    cells = cells_for(len(train), config.clusters, config.cells)
    count = min(len(train), cells * SAMPLE_PER_CELL)
    fitted_on = torch.from_numpy(train[np.arange(count) * len(train) // count])
    progress("fitting clusters", 0, None)
    clustering = cluster(
        samples.features(fitted_on).numpy(),
        config.clusters,
        cells=cells,
        seed=config.seed,
        balance=config.balance,
        strict=config.insists_on_balance,
        threads=config.threads,
    )
    return {"fine": torch.from_numpy(clustering.fine), "coarse": torch.from_numpy(clustering.coarse)}


def by_label(index: Index, samples: LatentDataset, config: PartitionConfig, progress: Progress) -> Rule:
    """Whole classes dealt out to clusters, the largest class first, always to the smallest cluster.

    A sample without a label (repeats with conflicting labels have none) goes where `by_random` would put it.
    """
    labels = index.labels
    if labels.max() < 0:
        raise UserError("--by label: no sample of the data has a label; use --by features")
    train = labels[index.rows("train")]
    counts = np.bincount(train[train >= 0], minlength=labels.max() + 1)
    if (classes := int((counts > 0).sum())) < config.clusters:
        raise UserError(f"-k {config.clusters}: only {classes} labels to deal out with --by label; use a smaller -k")
    mass = np.zeros(config.clusters)
    table = np.zeros(len(counts), dtype=np.int64)
    for label in np.lexsort((np.arange(len(counts)), -counts)):
        table[label] = mass.argmin()
        mass[table[label]] += counts[label]
    return {"labels": torch.from_numpy(table), **by_random(index, samples, config, progress)}


def by_random(index: Index, samples: LatentDataset, config: PartitionConfig, progress: Progress) -> Rule:
    """A cluster from the hash of (seed, id): random, yet the same for a sample whatever else is in the set."""
    return {"random": torch.tensor([config.seed, config.clusters])}


RULES = {"features": by_features, "label": by_label, "random": by_random}


def assign(
    rule: Path,
    data: Artifact,
    index: Index,
    first: int,
    config: PartitionConfig,
    executor: Executor,
    progress: Progress,
) -> np.ndarray:
    """Cluster int64 of the samples from row `first` on, by the rule of a partition, shard by shard.

    A shard is assigned in one call with a fixed number of threads, so that it does not matter who does it.
    """
    names = data.names("shards/")
    # rows are in shard order: shard i holds the rows starts[i] : starts[i + 1]
    starts = np.searchsorted(index.table["shard"].to_numpy(), np.arange(len(names) + 1)).tolist()
    tasks = [
        AssignTask(number, data.file(names[number]), rule, config.threads)
        for number in range(len(names))
        if starts[number + 1] > max(starts[number], first)
    ]
    assignment = np.full(len(index) - first, -1, dtype=np.int64)
    done = 0
    for _, (number, clusters) in executor.map(assign_shard, tasks, retries=3):
        start, stop = starts[number], starts[number + 1]
        assert len(clusters) == stop - start, "index and shard differ in number"
        here = assignment[start - first : stop - first]
        here[:] = clusters  # what Ray answers cannot be written to
        if len(by_id := np.flatnonzero(here < 0)):
            seed, count = load_file(rule).get("random", torch.tensor([config.seed, config.clusters])).tolist()
            ids = index.table["id"].slice(start, stop - start).take(pa.array(by_id)).to_pylist()
            here[by_id] = [random_cluster(identity, seed, count) for identity in ids]
        done += len(clusters)
        progress("assigning samples", done, len(assignment))
    assert len(assignment) == 0 or assignment.min() >= 0, "a sample was left without a cluster"
    return assignment


@dataclass(frozen=True)
class AssignTask:
    """One shard of the data to assign by the rule in a file."""

    number: int
    shard: Path
    rule: Path
    threads: int


def assign_shard(task: AssignTask) -> tuple[int, np.ndarray]:
    """The shard's number and the cluster int64 of its samples; -1 where the id alone decides."""
    rule, shard = load_file(task.rule), read_shard(task.shard)
    if "fine" in rule:
        clustering = Clustering(rule["fine"].numpy(), rule["coarse"].numpy())
        return task.number, clustering.assign(shard["features"].numpy(), task.threads)[0]
    labels = shard["labels"].numpy()
    if "labels" not in rule:
        return task.number, np.full(len(labels), -1, dtype=np.int64)
    table = rule["labels"].numpy()
    assert labels.max(initial=-1) < len(table), "prepare takes late labels off that were not there before"
    return task.number, np.where(labels >= 0, table[labels.clip(min=0)], -1)


def random_cluster(identity: str, seed: int, clusters: int) -> int:
    digest = hashlib.sha256(f"cluster:{seed}:{identity}".encode()).digest()
    return int.from_bytes(digest[:8], "big") * clusters >> 64


def count_sizes(assignment: np.ndarray, splits: np.ndarray, clusters: int) -> list[dict[str, int]]:
    return [{split: int(((assignment == k) & (splits == split)).sum()) for split in SPLITS} for k in range(clusters)]


def write_assignment(path: Path, index: Index, assignment: np.ndarray) -> None:
    table = pa.table({"id": index.table["id"], "cluster": pa.array(assignment, pa.int32())})
    pq.write_table(table, path, compression="zstd")


def write_sheets(
    folder: Path, index: Index, samples: LatentDataset, assignment: np.ndarray, clusters: int, space: LatentConfig
) -> None:
    """One sheet per cluster: its first training samples in id order, which is a random choice."""
    autoencoder = load_autoencoder(space.autoencoder)
    train = index.splits == "train"
    for k in range(clusters):
        rows = np.flatnonzero(train & (assignment == k))[:SHEET_IMAGES]
        write_sheet(folder / f"{k:02d}.png", images_of(samples.latents(torch.from_numpy(rows)), space, autoencoder))
