"""The partition stage: a data artifact is cut into clusters, each with shards of its own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from ..artifacts import Artifact, ArtifactWriter, Store, UserError, canonical_json, load_if_same
from ..data.classes import class_names
from ..data.dataset import LatentDataset
from ..data.index import SPLITS, Index
from ..data.progress import Progress, silent
from ..data.shards import data_shards, read_shard
from ..executor import Executor
from ..models.autoencoders import load_autoencoder
from ..plugins import loaded_plugins
from .assignment import FILE, assigned_clusters, write_assignment
from .config import PartitionConfig
from .layout import write_clusters
from .methods import OPTIONS, TENSORS, Method
from .quality import SUMMARY, measure, summarize
from .report import write_report, write_sheet

KIND = "partition"
FIT_ROWS = 262_144  # training samples that a method is fitted to: 256 for each of 1,024 k-means cells, as faiss advises
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

    Clusters are fitted on the train split; validation and holdout samples are assigned by the same method. With `onto`,
    nothing is fitted: `data` was prepared on top of the data of that older partition, whose clusters stay as they are,
    and only the samples added since are assigned.
    """
    parent = Artifact.open(data, "data")
    old = None if onto is None else open_older(onto, parent)
    if old is not None:
        if config != PartitionConfig():
            raise UserError(f"--onto {old.store}: its own settings hold; leave out all others")
        config = PartitionConfig.model_validate(old.config)
    parents = {"data": parent.digest} | ({} if old is None else {"partition": old.digest})
    if (there := load_if_same(out, KIND, config.resolved(), parents)) is not None:
        return there
    index, samples = Index.of(parent), LatentDataset.of(parent)
    if config.clusters > (train := len(index.rows("train"))):
        raise UserError(
            f"-k {config.clusters}: larger than the {train} training samples of {parent.store}; use a smaller -k"
        )
    with ArtifactWriter(out, KIND) as writer, executor or Executor() as executor:
        progress("fitting clusters", 0, None)
        if old is None:
            clusters = np.full(len(index), -1)
            method = fit(samples, index, config)
        else:
            clusters = assigned_clusters(index, old)
            method = Method.load(old.file(OPTIONS), old.file(TENSORS))
        method.save(writer.folder)
        new = clusters < 0
        assign(writer.folder, parent, index, clusters, executor, progress)
        sizes = [
            {split: int(((clusters == k) & (index.splits == split)).sum()) for split in SPLITS}
            for k in range(config.clusters)
        ]
        if empty := [k for k, size in enumerate(sizes) if size["train"] == 0]:
            raise UserError(f"-k {config.clusters}: cluster {empty[0]} has no training samples; use a smaller -k")
        write_assignment(writer.folder / FILE, index, clusters)
        written = write_clusters(writer.folder, parent, index, clusters, new, old, config, executor, progress)
        progress("writing the report", 0, None)
        quality = measure(index, clusters, sizes, config.seed)
        summary = summarize(index, clusters, config.clusters, class_names(parent), config.seed)
        tables = {"sizes.json": {"clusters": sizes}, "quality.json": quality, SUMMARY: {"clusters": summary}}
        for name, content in tables.items():
            (writer.folder / name).write_bytes(canonical_json(content) + b"\n")
        sheets = writer.folder / "sheets"
        write_sheets(sheets, samples, index, clusters, config)
        write_report(writer.folder / "partition.html", config, parent.config, sizes, quality, summary, sheets)
        return writer.commit(
            config=config.resolved(),
            parents=parents,
            license=parent.manifest.license,
            written=written,
            provenance={"plugins": loaded_plugins()},
        )


def open_older(place: str | Path | Store, data: Artifact) -> Artifact:
    """The partition that a newer one is made on top of."""
    old = Artifact.open(place, KIND)
    if data.manifest.parents.get("data") != old.manifest.parents["data"]:
        raise UserError(
            f"--onto {old.store}: {data.store} was not prepared on top of its data; "
            "run `atoll prepare` with --onto first"
        )
    return old


def sample_rows(rows: np.ndarray, count: int, seed: int) -> np.ndarray:
    """At most `count` of these rows int64 [n], drawn at random, in rising order."""
    return np.sort(np.random.Generator(np.random.Philox(seed)).permutation(rows)[:count])


def fit(samples: LatentDataset, index: Index, config: PartitionConfig) -> Method:
    """The configured method, fitted to a random sample of the training samples."""
    rows = sample_rows(index.rows("train"), FIT_ROWS, config.seed)
    features, ids = samples.features(torch.from_numpy(rows)).numpy(), index.table["id"].take(rows).to_pylist()
    return config.make_method().fitted(features, index.labels[rows], ids, config.clusters, config.seed)


@dataclass(frozen=True)
class AssignTask:
    """Rows int64 [n] of one shard of the data to assign by the method saved in `folder`."""

    folder: Path
    shard: tuple[Path, Path]
    rows: np.ndarray
    ids: list[str]


def assign(
    folder: Path, data: Artifact, index: Index, clusters: np.ndarray, executor: Executor, progress: Progress
) -> None:
    """Fill in the cluster of every sample that has none, -1, shard by shard."""
    shard, row = index.places
    shards, rest = data_shards(data), clusters < 0
    places = [np.flatnonzero(rest & (shard == number)) for number in range(len(shards))]

    def tasks() -> Iterator[AssignTask]:
        for paths, rows in zip(shards, places, strict=True):
            yield AssignTask(folder, paths, row[rows], index.table["id"].take(rows).to_pylist())

    done = 0
    for number, found in executor.map(assign_shard, tasks()):
        clusters[places[number]] = found
        done += len(found)
        progress("assigning samples", done, int(rest.sum()))
    assert clusters.min(initial=0) >= 0, "a sample was left without a cluster"


def assign_shard(task: AssignTask) -> np.ndarray:
    """The cluster int64 [n] of some samples of a shard; always in one call, whichever worker makes it."""
    if len(task.rows) == 0:
        return np.zeros(0, dtype=np.int64)
    method, shard = Method.load(task.folder / OPTIONS, task.folder / TENSORS), read_shard(*task.shard)
    rows = torch.from_numpy(task.rows).long()
    return method.assign(shard["features"][rows].numpy(), shard["labels"][rows].numpy(), task.ids)


def write_sheets(
    folder: Path, samples: LatentDataset, index: Index, clusters: np.ndarray, config: PartitionConfig
) -> None:
    """A sample grid per cluster, of random training samples."""
    autoencoder, train = load_autoencoder(samples.latent.autoencoder), index.splits == "train"
    for k in range(config.clusters):
        rows = sample_rows(np.flatnonzero(train & (clusters == k)), SHEET_IMAGES, config.seed)
        latents = samples.latent.denormalize(samples.latents(torch.from_numpy(rows)))
        write_sheet(folder / f"{k:02d}.png", latents, autoencoder)
