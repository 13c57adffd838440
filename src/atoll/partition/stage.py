"""The partition stage: a data artifact is cut into clusters, each with shards of its own."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import load_file, save_file

from ..artifacts import Artifact, ArtifactWriter, Store, UserError, canonical_json, load_if_same
from ..data.dataset import LatentDataset
from ..data.index import Index
from ..data.progress import Progress, silent
from ..executor import Executor
from ..plugins import loaded_plugins
from .assignment import ASSIGNMENT, assigned_clusters, write_assignment
from .layout import write_clusters
from .methods import Method, PartitionConfig, State
from .report import CLUSTERS_FILE, summarize, write_report

KIND = "partition"
CENTROIDS = "centroids.safetensors"  # or whatever the method has learned
FIT_ROWS = 262_144  # training samples that a method is fitted to: 256 for each of 1,024 k-means cells, as faiss advises
ASSIGNED_AT_ONCE = 65_536


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
        method = config.make_method()
        clusters = np.full(len(index), -1) if old is None else assigned_clusters(index, old)
        state = fit(method, samples, index, config) if old is None else load_file(old.file(CENTROIDS))
        save_file({name: np.ascontiguousarray(value) for name, value in state.items()}, writer.folder / CENTROIDS)
        new = clusters < 0
        assign(method, state, samples, index, clusters, progress)
        summary = summarize(parent, index, clusters, config)
        if empty := [k for k, cluster in enumerate(summary["clusters"]) if cluster["train"] == 0]:
            raise UserError(f"-k {config.clusters}: cluster {empty[0]} has no training samples; use a smaller -k")
        (writer.folder / CLUSTERS_FILE).write_bytes(canonical_json(summary) + b"\n")
        write_assignment(writer.folder / ASSIGNMENT, index, clusters)
        written = write_clusters(writer.folder, parent, index, clusters, new, old, config, executor, progress)
        progress("writing the report", 0, None)
        write_report(writer.folder, parent, samples, index, clusters, config, summary)
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


def fit(method: Method, samples: LatentDataset, index: Index, config: PartitionConfig) -> State:
    """Fit a method to a random sample of the training samples."""
    rows = np.sort(index.shuffled("train", seed=config.seed)[:FIT_ROWS])
    features, ids = samples.features(torch.from_numpy(rows)).numpy(), index.table["id"].take(rows).to_pylist()
    return method.fit(features, index.labels[rows], ids, config.clusters, config.seed)


def assign(
    method: Method, state: State, samples: LatentDataset, index: Index, clusters: np.ndarray, progress: Progress
) -> None:
    """Fill in the cluster of every sample that has none, -1."""
    rest = np.flatnonzero(clusters < 0)
    for start in range(0, len(rest), ASSIGNED_AT_ONCE):
        progress("assigning samples", start, len(rest))
        rows = rest[start : start + ASSIGNED_AT_ONCE]
        features, ids = samples.features(torch.from_numpy(rows)).numpy(), index.table["id"].take(rows).to_pylist()
        clusters[rows] = method.assign(state, features, index.labels[rows], ids)
    if left := int((clusters < 0).sum()):
        raise UserError(
            f"{left} samples have no label, or one that no training sample had, and --method label cannot assign them; "
            "use --method kmeans"
        )
