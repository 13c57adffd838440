"""How good a partition is: balance, separation, and agreement with labels, against random and plain pixels."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ..data.index import Index
from ..data.shards import ShardSet
from ..data.text import split_words
from .clustering import TooFewGroups, cells_for, cluster, unit_length

MEASURED = 20_000  # samples to measure agreement on; ids are hashes, so the first are a random choice
SILHOUETTE_SAMPLES = 2_000  # its cost grows with the square
WORDS_SHOWN = 8


def measure(
    index: Index, samples: ShardSet, assignment: np.ndarray, sizes: Sequence[dict[str, int]], seed: int, threads: int
) -> dict[str, Any]:
    """Numbers for the report, rounded so that they mean the same on another machine.

    nmi is the normalised mutual information of clusters and labels (0: unrelated, 1: the same); beside it that of
    randomly dealt clusters of the same sizes, and of clusters made the same way from plain pixels, None where pixels
    make too few groups. `unlabelled` counts the samples of the whole data without a label.
    """
    from sklearn.metrics import normalized_mutual_info_score, silhouette_score  # takes a second to import

    train = index.rows("train")[:MEASURED]
    chosen = torch.from_numpy(train[:SILHOUETTE_SAMPLES])
    counts = [size["train"] for size in sizes]
    quality: dict[str, Any] = {"balance": round(max(counts) / min(counts), 4), "silhouette": None, "nmi": None}
    quality["unlabelled"] = int((index.labels < 0).sum())
    clusters_seen = assignment[chosen.numpy()]
    if 1 < len(set(clusters_seen.tolist())) < len(chosen):
        features = unit_length(samples.features(chosen).numpy())
        quality["silhouette"] = round(float(silhouette_score(features, clusters_seen)), 4)
    labelled = train[index.labels[train] >= 0]  # repeats with conflicting labels have none
    labels = index.labels[labelled]
    if 2 * len(labelled) > len(train) and len(set(labels.tolist())) > 1:
        found = assignment[labelled]
        shuffled = np.random.Generator(np.random.Philox(seed)).permutation(found)
        others = {
            "clusters": found,
            "random": shuffled,
            "pixels": by_pixels(samples, labelled, len(sizes), seed, threads),
        }
        quality["nmi"] = {
            name: None if cut is None else round(float(normalized_mutual_info_score(labels, cut)), 4)
            for name, cut in others.items()
        }
    return quality


def by_pixels(samples: ShardSet, rows: np.ndarray, clusters: int, seed: int, threads: int) -> np.ndarray | None:
    """Clusters of the same samples made in the same way from their thumbnails, without a bound on balance.

    None where that cannot be done: it is a comparison, and no reason to refuse the cut it is compared with.
    """
    pixels = samples.thumbnails(torch.from_numpy(rows)).float().flatten(1).numpy() / 255.0
    cells = cells_for(len(rows), clusters, 1024)
    try:
        made = cluster(pixels, clusters, cells=cells, seed=seed, balance=None, threads=threads)
    except TooFewGroups:
        return None
    return made.assign(pixels, threads)[0]


def telling_words(captions: Sequence[Sequence[str]], assignment: np.ndarray, clusters: int) -> list[list[str]]:
    """The words that set each cluster's captions apart.

    By the log-odds of a word inside against outside, shrunk towards none by the word's frequency over all (Monroe et
    al., "Fightin' Words") and divided by its standard error: rare words do not win by accident.
    """
    inside: list[Counter[str]] = [Counter() for _ in range(clusters)]
    for texts, k in zip(captions, assignment.tolist(), strict=True):
        inside[k].update(word for text in texts for word in set(split_words(text)))
    everything = sum(inside, Counter())
    total = sum(everything.values())
    told = []
    for counts in inside:
        here = sum(counts.values())
        scores = {}
        for word, count in counts.items():
            prior = everything[word]
            rest = everything[word] - count
            odds = math.log((count + prior) / (here + total - count - prior + 1e-9))
            odds -= math.log((rest + prior) / (2 * total - here - rest - prior + 1e-9))
            scores[word] = odds / math.sqrt(1.0 / (count + prior) + 1.0 / (rest + prior))
        best = sorted(scores, key=lambda word: (-scores[word], word))
        told.append([word for word in best if scores[word] > 1.0][:WORDS_SHOWN])
    return told
