"""Two-level k-means: many fine cells fitted on a sample, then K coarse clusters made of whole cells.

A sample belongs to the cluster of its nearest fine cell. That rule is all there is to a partition, so a sample
that comes later, or that was never in the fit, is assigned by it too. Balance is kept by choosing which cells
make a cluster, not by moving samples, so the rule stays the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import faiss
import numpy as np

from ..artifacts import UserError

ITERATIONS = 25
COARSE_STARTS = 10  # k-means over a thousand cells costs nothing, and a bad start costs much: keep the best of ten
SAMPLE_PER_CELL = 256  # faiss's own advice: more points do not make better centroids
ROWS_PER_CELL = 8  # a small set gets fewer cells, so that a cell is still a group


class TooFewGroups(UserError):
    """There are not as many groups in the samples as clusters were asked for."""


@dataclass(frozen=True)
class Clustering:
    """fine float32 [F, D] centroids of cells, coarse int64 [F] the cluster of each cell."""

    fine: np.ndarray
    coarse: np.ndarray

    def assign(self, features: np.ndarray, threads: int) -> tuple[np.ndarray, np.ndarray]:
        """Cluster int64 [N] of each feature, and its squared distance to the nearest cell float32 [N]."""
        index = faiss.IndexFlatL2(self.fine.shape[1])
        with faiss_threads(threads):
            index.add(self.fine)
            distance, cell = index.search(unit_length(features), 1)
        return self.coarse[cell[:, 0]], distance[:, 0]


def unit_length(features: np.ndarray) -> np.ndarray:
    """Features scaled to length 1 (an all-zero one stays zero): what counts is their direction."""
    length = np.linalg.norm(features, axis=1, keepdims=True)
    return np.ascontiguousarray(features / np.where(length > 0, length, 1.0), dtype=np.float32)


def cells_for(samples: int, clusters: int, most: int) -> int:
    """How many fine cells: `most`, fewer for a small set, never fewer than clusters."""
    return max(clusters, min(most, samples // ROWS_PER_CELL))


def cluster(
    sample: np.ndarray,
    clusters: int,
    *,
    cells: int,
    seed: int,
    balance: float | None,
    threads: int,
    strict: bool = True,
) -> Clustering:
    """Fit on `sample` float32 [n, D] (features of any length), K clusters of cells.

    `balance` bounds the size of the largest cluster over that of the smallest, counted in the sample; unless `strict`,
    it is come as near as the cells allow.
    """
    points = unit_length(sample)
    different = len({hashlib.blake2b(row.tobytes(), digest_size=16).digest() for row in points})
    if clusters > different:
        raise TooFewGroups(
            f"-k {clusters}: there are only {different} different training samples to cluster; use a smaller -k"
        )
    cells = min(cells, different)
    with faiss_threads(threads):
        fine = kmeans(points, cells, seed)
        index = faiss.IndexFlatL2(fine.shape[1])
        index.add(fine)
        owner = index.search(points, 1)[1][:, 0]
    # a cell that took no sample has no say, and would only attract strangers later
    used, sizes = np.unique(owner, return_counts=True)
    fine = np.ascontiguousarray(fine[used])
    if len(fine) < clusters:
        raise TooFewGroups(f"-k {clusters}: k-means found only {len(fine)} separate groups; use a smaller -k")
    with faiss_threads(1):  # so small that threads wait for each other twenty times as long as they compute
        coarse = coarse_clusters(fine, sizes, clusters, seed)
    if balance is not None:
        coarse = rebalance(fine, sizes, coarse, clusters, balance, strict)
    return Clustering(fine, by_size(coarse, sizes, clusters))


def kmeans(points: np.ndarray, k: int, seed: int, weights: np.ndarray | None = None, starts: int = 1) -> np.ndarray:
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


def coarse_clusters(fine: np.ndarray, sizes: np.ndarray, clusters: int, seed: int) -> np.ndarray:
    """Cluster int64 [F] of each cell by k-means over cells, each as heavy as the samples it holds."""
    centroids = kmeans(fine, clusters, seed, weights=sizes.astype(np.float32), starts=COARSE_STARTS)
    distance = squared_distances(fine, centroids)
    coarse: np.ndarray = distance.argmin(1)
    # k-means may leave a centroid without cells: give it the cell that fits its own cluster worst
    for empty in np.setdiff1d(np.arange(clusters), coarse):
        spare = np.bincount(coarse, minlength=clusters)[coarse] > 1
        misfit = np.where(spare, distance[np.arange(len(fine)), coarse], -1.0)
        coarse[misfit.argmax()] = empty
    return coarse


def rebalance(
    fine: np.ndarray, sizes: np.ndarray, coarse: np.ndarray, clusters: int, bound: float, strict: bool = True
) -> np.ndarray:
    """Move cells between clusters until the largest is at most `bound` times the smallest.

    A move takes a cell out of the largest cluster or into the smallest one, never makes its new cluster as large as
    the old one was, and is the one that adds least squared distance per sample moved. Each move lowers the sum
    of squared sizes, so the loop ends.
    """
    cells, coarse = fine.astype(np.float64), coarse.copy()
    member = (coarse[None, :] == np.arange(clusters)[:, None]) * sizes.astype(np.float64)  # [K, F]
    mass, total = member.sum(1), member @ cells
    distance = squared_distances(cells, total / mass[:, None])  # [F, K]
    every, length = np.arange(len(cells)), (cells**2).sum(1)
    while mass.max() > bound * mass.min():
        cost = distance - distance[every, coarse][:, None]
        allowed = mass[None, :] + sizes[:, None] < mass[coarse][:, None]
        allowed &= (coarse == mass.argmax())[:, None] | (np.arange(clusters) == mass.argmin())[None, :]
        if not allowed.any() and not strict:
            break
        if not allowed.any():
            raise UserError(
                f"--balance {bound:g}: cannot be reached, the best is {mass.max() / mass.min():.3g} with "
                f"{len(fine)} cells; raise it, or use more cells (--set cells=N) or a smaller -k"
            )
        cell, target = np.unravel_index(np.where(allowed, cost, np.inf).argmin(), cost.shape)
        for cluster, sign in ((coarse[cell], -1.0), (target, 1.0)):
            mass[cluster] += sign * sizes[cell]
            total[cluster] += sign * sizes[cell] * cells[cell]
            centre = total[cluster] / mass[cluster]
            distance[:, cluster] = length - 2.0 * cells @ centre + centre @ centre
        coarse[cell] = target
    return coarse


def by_size(coarse: np.ndarray, sizes: np.ndarray, clusters: int) -> np.ndarray:
    """Number the clusters from the largest to the smallest; equal ones by their first cell."""
    mass = np.bincount(coarse, weights=sizes, minlength=clusters)
    first = np.array([np.flatnonzero(coarse == k)[0] for k in range(clusters)])
    order = np.lexsort((first, -mass))
    rank = np.empty(clusters, dtype=np.int64)
    rank[order] = np.arange(clusters)
    return np.asarray(rank[coarse])


def squared_distances(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """|a_i - b_j|^2, float64 [len(a), len(b)]."""
    a, b = a.astype(np.float64), b.astype(np.float64)
    distance: np.ndarray = np.maximum((a**2).sum(1)[:, None] + (b**2).sum(1)[None, :] - 2.0 * a @ b.T, 0.0)
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
