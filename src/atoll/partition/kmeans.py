"""Two-level k-means: many fine cells fitted to a sample, then K clusters made of whole cells.

A sample belongs to the cluster of its nearest cell, also one that was not in the fit or is added later. Balance is
kept by choosing which cells make a cluster, not by moving samples.
"""

from __future__ import annotations

import hashlib
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
    balance_required: bool = Field(default=False, description="fail if the bound cannot be kept")
    threads: int = Field(default=1, gt=0, description="of faiss; they change the last bits of the result")

    def fit(self, features: Array, labels: Array, ids: Sequence[str], clusters: int, seed: int) -> State:
        points = unit_length(features)
        distinct = len({hashlib.blake2b(row.tobytes(), digest_size=16).digest() for row in points})
        if clusters > distinct:
            raise UserError(
                f"-k {clusters}: there are only {distinct} different training samples to cluster; use a smaller -k"
            )
        count = min(distinct, max(clusters, min(self.cells, len(points) // ROWS_PER_CELL)))
        with faiss_threads(self.threads):
            cells = kmeans(points, count, seed)
            owner = nearest(points, cells)
        # a cell without samples would attract samples that are added later
        used, sizes = np.unique(owner, return_counts=True)
        cells = np.ascontiguousarray(cells[used])
        if len(cells) < clusters:
            raise UserError(f"-k {clusters}: k-means found only {len(cells)} separate groups; use a smaller -k")
        with faiss_threads(1):  # so small that threads wait for each other twenty times as long as they compute
            cluster_of = coarse_clusters(cells, sizes, clusters, seed)
        if self.balance is not None:
            cluster_of = rebalance(cells, sizes, cluster_of, clusters, self.balance, required=self.balance_required)
        return {"cells": cells, "cluster_of": relabel_by_size(cluster_of, sizes, clusters)}

    def assign(self, features: Array, labels: Array, ids: Sequence[str]) -> Array:
        with faiss_threads(self.threads):
            owner = nearest(unit_length(features), self.state["cells"])
        return np.asarray(self.state["cluster_of"][owner], dtype=np.int64)


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
    engine = faiss.Kmeans(
        points.shape[1],
        k,
        niter=ITERATIONS,
        nredo=starts,
        seed=seed,
        min_points_per_centroid=1,
        max_points_per_centroid=len(points),
    )
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


def rebalance(cells: Array, sizes: Array, cluster_of: Array, clusters: int, bound: float, required: bool) -> Array:
    """Move cells between clusters until the largest is at most `bound` times the smallest, or as near as they allow.

    A move takes a cell out of the largest cluster or into the smallest one, never makes its new cluster as large as
    the old one was, and is the one that adds least squared distance per sample moved. Each move lowers the sum of
    squared sizes, so the loop ends.
    """
    cells, cluster_of = cells.astype(np.float64), cluster_of.copy()
    member = (cluster_of[None, :] == np.arange(clusters)[:, None]) * sizes.astype(np.float64)  # [K, F]
    mass, total = member.sum(1), member @ cells
    distance = squared_distances(cells, total / mass[:, None])  # [F, K]
    every, length = np.arange(len(cells)), (cells**2).sum(1)
    while mass.max() > bound * mass.min():
        cost = distance - distance[every, cluster_of][:, None]
        allowed = mass[None, :] + sizes[:, None] < mass[cluster_of][:, None]
        allowed &= (cluster_of == mass.argmax())[:, None] | (np.arange(clusters) == mass.argmin())[None, :]
        if not allowed.any() and not required:
            break
        if not allowed.any():
            raise UserError(
                f"--balance {bound:g}: cannot be reached, the best is {mass.max() / mass.min():.3g} with "
                f"{len(cells)} cells; raise it, or use more cells (--set options.cells=N) or a smaller -k"
            )
        cell, target = np.unravel_index(np.where(allowed, cost, np.inf).argmin(), cost.shape)
        for cluster, sign in ((cluster_of[cell], -1.0), (target, 1.0)):
            mass[cluster] += sign * sizes[cell]
            total[cluster] += sign * sizes[cell] * cells[cell]
            center = total[cluster] / mass[cluster]
            distance[:, cluster] = length - 2.0 * cells @ center + center @ center
        cluster_of[cell] = target
    return cluster_of


def relabel_by_size(cluster_of: Array, sizes: Array, clusters: int) -> Array:
    """Number the clusters from the largest to the smallest; equal ones by their first cell."""
    mass = np.bincount(cluster_of, weights=sizes, minlength=clusters)
    first = np.array([np.flatnonzero(cluster_of == k)[0] for k in range(clusters)])
    order = np.lexsort((first, -mass))
    return np.asarray(np.argsort(order)[cluster_of])


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
