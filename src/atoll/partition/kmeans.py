"""Two-level k-means: many fine cells fitted to a sample, then K clusters made of whole cells.

A sample belongs to the cluster of its nearest cell, also one that was not in the fit or is added later. Balance is
kept by choosing which cells make a cluster, not by moving samples.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import faiss
import numpy as np
from pydantic import Field

from ..artifacts import UserError
from .methods import Array, Method, State, clustering

ITERATIONS = 25
COARSE_STARTS = 10  # k-means over a thousand cells costs little, and a bad start costs much: keep the best of ten
ROWS_PER_CELL = 8  # a small set gets fewer cells, so that a cell is still a group


@clustering("kmeans")
class KMeans(Method):
    """Clusters of features, compared by direction. State: cells float32 [F, D], cluster_of int64 [F]."""

    cells: int = Field(default=1024, gt=0, description="fine centroids; fewer are used for a small set")
    balance: float | None = Field(
        default=2.0, ge=1, allow_inf_nan=False, description="largest over smallest cluster; None: no bound"
    )
    threads: int = Field(default=1, gt=0, description="of faiss; they change the last bits of the result")

    def fit(self, features: Array, labels: Array, ids: Sequence[str], clusters: int, seed: int) -> State:
        points = unit_length(features)
        count = min(len(points), max(clusters, min(self.cells, len(points) // ROWS_PER_CELL)))
        with faiss_threads(self.threads):
            cells = kmeans(points, count, seed)
            # a cell without samples would attract samples that are added later
            used, sizes = np.unique(nearest(points, cells), return_counts=True)
            if len(used) < clusters:
                raise UserError(f"-k {clusters}: k-means found only {len(used)} separate groups; use a smaller -k")
            cells = np.ascontiguousarray(cells[used])
            cluster_of = coarse_clusters(cells, sizes, clusters, seed)
        if self.balance is not None:
            cluster_of = rebalance(cells, sizes, cluster_of, clusters, self.balance)
        largest_first = np.argsort(-np.bincount(cluster_of, weights=sizes, minlength=clusters), kind="stable")
        return {"cells": cells, "cluster_of": np.argsort(largest_first)[cluster_of]}

    def assign(self, state: State, features: Array, labels: Array, ids: Sequence[str]) -> Array:
        with faiss_threads(self.threads):
            cell = nearest(unit_length(features), state["cells"])
        return np.asarray(state["cluster_of"][cell], dtype=np.int64)


def unit_length(features: Array) -> Array:
    """Features float32 [N, D] scaled to length 1; an all-zero one stays zero."""
    length = np.linalg.norm(features, axis=1, keepdims=True)
    return np.ascontiguousarray(features / np.where(length > 0, length, 1.0), dtype=np.float32)


def nearest(points: Array, centroids: Array) -> Array:
    """The nearest centroid int64 [N] of each point [N, D]."""
    index = faiss.IndexFlatL2(centroids.shape[1])
    index.add(centroids)
    return np.asarray(index.search(points, 1)[1][:, 0])


def kmeans(points: Array, k: int, seed: int, weights: Array | None = None, starts: int = 1) -> Array:
    """faiss k-means on all points, the best of `starts`; centroids float32 [k, D]."""
    if k == len(points):
        return points.copy()
    bounds = {"min_points_per_centroid": 1, "max_points_per_centroid": len(points)}
    engine = faiss.Kmeans(points.shape[1], k, niter=ITERATIONS, nredo=starts, seed=seed, **bounds)
    engine.train(points, weights=weights)
    return np.array(engine.centroids, dtype=np.float32).reshape(k, -1)


def coarse_clusters(cells: Array, sizes: Array, clusters: int, seed: int) -> Array:
    """Cluster int64 [F] of each cell by k-means over cells, each weighted by the samples it holds."""
    centroids = kmeans(cells, clusters, seed, weights=sizes.astype(np.float32), starts=COARSE_STARTS)
    distance = squared_distances(cells, centroids)
    cluster_of: Array = distance.argmin(1)
    # k-means may leave a centroid without cells: give it the cell that fits its own cluster worst
    for empty in np.setdiff1d(np.arange(clusters), cluster_of):
        spare = np.bincount(cluster_of, minlength=clusters)[cluster_of] > 1
        misfit = np.where(spare, distance[np.arange(len(cells)), cluster_of], -1.0)
        cluster_of[misfit.argmax()] = empty
    return cluster_of


def rebalance(cells: Array, sizes: Array, cluster_of: Array, clusters: int, bound: float) -> Array:
    """Move cells between clusters until the largest is at most `bound` times the smallest, or as near as they allow.

    A move takes a cell out of the largest cluster or into the smallest one, never makes its new cluster as large as
    the old one was, and is the one that adds least squared distance per sample moved. Each move lowers the sum of
    squared sizes, so the loop ends.
    """
    cluster_of, every, numbers = cluster_of.copy(), np.arange(len(cells)), np.arange(clusters)
    while True:
        mass = np.bincount(cluster_of, weights=sizes, minlength=clusters)
        member = (cluster_of == numbers[:, None]) * sizes  # [K, F]
        distance = squared_distances(cells, member @ cells.astype(np.float64) / mass[:, None])  # [F, K]
        allowed = mass + sizes[:, None] < mass[cluster_of][:, None]
        allowed &= (cluster_of == mass.argmax())[:, None] | (numbers == mass.argmin())
        if mass.max() <= bound * mass.min() or not allowed.any():
            return cluster_of
        cost = np.where(allowed, distance - distance[every, cluster_of][:, None], np.inf)
        cell, target = np.unravel_index(cost.argmin(), cost.shape)
        cluster_of[cell] = target


def squared_distances(a: Array, b: Array) -> Array:
    """|a_i - b_j|^2, float64 [len(a), len(b)]."""
    a, b = a.astype(np.float64), b.astype(np.float64)
    distance: Array = np.maximum((a**2).sum(1)[:, None] + (b**2).sum(1)[None, :] - 2.0 * a @ b.T, 0.0)
    return distance


@contextmanager
def faiss_threads(count: int) -> Iterator[None]:
    """Let faiss use `count` threads inside: the last bits may depend on it."""
    before = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(count)
    try:
        yield
    finally:
        faiss.omp_set_num_threads(before)
