"""How good a partition is: balance, separation, and agreement with labels, against random clusters."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ..artifacts import Artifact
from ..data.classes import class_title
from ..data.dataset import LatentDataset
from ..data.index import Index
from ..data.text import split_words
from .clustering import unit_length

MEASURED = 20_000  # samples to measure agreement on; ids are hashes, so the first are a random choice
SILHOUETTE_SAMPLES = 2_000  # its cost grows with the square
WORDS_SHOWN = 8
CLASSES_SHOWN = 6
HALF = 0.5  # added to every count, so that none is zero
DESCRIPTION = "described.json"


def measure(
    index: Index, samples: LatentDataset, assignment: np.ndarray, sizes: Sequence[dict[str, int]], seed: int
) -> dict[str, Any]:
    """Numbers for the report, rounded so that they mean the same on another machine.

    nmi is the normalized mutual information of clusters and labels (0: unrelated, 1: the same), and that of random
    clusters of the same sizes. `unlabelled` counts the samples of the whole data without a label.
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
        }
        quality["nmi"] = {
            name: None if cut is None else round(float(normalized_mutual_info_score(labels, cut)), 4)
            for name, cut in others.items()
        }
    return quality


def telling_words(captions: Sequence[Sequence[str]], assignment: np.ndarray, clusters: int) -> list[list[str]]:
    """The words that set each cluster's images apart.

    By the log-odds that an image inside has the word in a caption, against one outside, shrunk towards none by the
    word's share of all images (Monroe et al., "Fightin' Words") and divided by its standard error: rare words do not
    win by accident, and a word that every image has sets none apart.
    """
    inside: list[Counter[str]] = [Counter() for _ in range(clusters)]
    images = np.zeros(clusters)
    for texts, k in zip(captions, assignment.tolist(), strict=True):
        inside[k].update({word for text in texts for word in split_words(text)})
        images[k] += bool(texts)
    everything, total = sum(inside, Counter()), images.sum()
    told = []
    for counts, here in zip(inside, images.tolist(), strict=True):
        scores = {}
        for word, count in counts.items():
            prior, rest = everything[word], everything[word] - count
            with_it = (count + prior + HALF, rest + prior + HALF)  # inside, outside
            without = (here + total - count - prior + HALF, 2 * total - here - rest - prior + HALF)
            odds = math.log(with_it[0] / without[0]) - math.log(with_it[1] / without[1])
            scores[word] = odds / math.sqrt(sum(1.0 / number for number in (*with_it, *without)))
        best = sorted(scores, key=lambda word: (-scores[word], word))
        told.append([word for word in best if scores[word] > 1.0][:WORDS_SHOWN])
    return told


def main_classes(
    labels: np.ndarray, assignment: np.ndarray, clusters: int, names: Sequence[str] | None
) -> list[list[tuple[str, float]]]:
    """The classes most of each cluster's labelled images belong to, and their shares, largest first."""
    told = []
    for k in range(clusters):
        own = labels[(assignment == k) & (labels >= 0)]
        numbers, counts = np.unique(own, return_counts=True)
        order = np.lexsort((numbers, -counts))[:CLASSES_SHOWN]
        told.append([(class_title(int(numbers[i]), names), round(float(counts[i] / len(own)), 4)) for i in order])
    return told


def described(partition: Artifact) -> list[list[str]]:
    """What a partition tells people about each cluster, a line each: its classes, and its words."""
    if DESCRIPTION not in partition.names():
        return [[]] * int(partition.config["clusters"])  # of an older atoll
    return [lines_about(told) for told in json.loads(partition.read(DESCRIPTION))["clusters"]]


def lines_about(told: Mapping[str, Any]) -> list[str]:
    classes = ", ".join(f"{name} {share:.0%}" for name, share in told["classes"])
    return [line for line in (classes, ", ".join(told["words"])) if line]
