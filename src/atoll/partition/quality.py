"""What the clusters are: their balance, agreement with labels, main classes and top words."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..artifacts import Artifact
from ..data.classes import class_title
from ..data.index import Index
from ..data.text import split_words

WORDS_SHOWN, CLASSES_SHOWN = 8, 6
CAPTIONED = 100_000  # training samples whose captions are read
HALF = 0.5  # added to every count, so that none is zero
SUMMARY = "summary.json"


def measure(index: Index, clusters: np.ndarray, sizes: Sequence[Mapping[str, int]], seed: int) -> dict[str, Any]:
    """Numbers for the report, rounded so that they are the same on another machine.

    nmi is the normalized mutual information of clusters and labels (0: unrelated, 1: the same), beside that of random
    clusters of the same sizes; None where fewer than half of the samples have a label, or all the same.
    """
    from sklearn.metrics import normalized_mutual_info_score  # takes a second to import

    counts = [size["train"] for size in sizes]
    train = index.rows("train")
    labelled = train[index.labels[train] >= 0]
    labels, found = index.labels[labelled], clusters[labelled]
    nmi = None
    if 2 * len(labelled) > len(train) and len(np.unique(labels)) > 1:
        shuffled = np.random.Generator(np.random.Philox(seed)).permutation(found)
        scores = {
            name: normalized_mutual_info_score(labels, c) for name, c in (("clusters", found), ("random", shuffled))
        }
        nmi = {name: round(float(score), 4) for name, score in scores.items()}
    return {
        "balance": round(max(counts) / min(counts), 4),
        "nmi": nmi,
        "unlabelled": int((index.labels < 0).sum()),
    }


def summarize(
    index: Index, clusters: np.ndarray, count: int, names: Sequence[str] | None, seed: int
) -> list[dict[str, Any]]:
    """Of each cluster its main classes, with their fractions, and its top words."""
    train = index.rows("train")
    captioned = np.random.Generator(np.random.Philox(seed)).permutation(train)[:CAPTIONED]
    words = top_words(index.captions_of(captioned), clusters[captioned], count)
    classes = main_classes(index.labels[train], clusters[train], count, names)
    return [{"classes": c, "words": w} for c, w in zip(classes, words, strict=True)]


def top_words(captions: Sequence[Sequence[str]], clusters: np.ndarray, count: int) -> list[list[str]]:
    """The words that set each cluster's images apart.

    By the log-odds that an image inside has the word in a caption, against one outside, shrunk towards none by the
    word's frequency over all images (Monroe et al., "Fightin' Words") and divided by its standard error: rare words do
    not win by accident, and a word that every image has sets none apart.
    """
    inside: list[Counter[str]] = [Counter() for _ in range(count)]
    images = np.zeros(count)
    for texts, k in zip(captions, clusters.tolist(), strict=True):
        inside[k].update({word for text in texts for word in split_words(text)})
        images[k] += bool(texts)
    everything, total = sum(inside, Counter()), images.sum()
    found = []
    for counts, here in zip(inside, images.tolist(), strict=True):
        scores = {}
        for word, with_it in counts.items():
            prior, rest = everything[word], everything[word] - with_it
            having = (with_it + prior + HALF, rest + prior + HALF)  # inside, outside
            without = (here + total - with_it - prior + HALF, 2 * total - here - rest - prior + HALF)
            odds = math.log(having[0] / without[0]) - math.log(having[1] / without[1])
            scores[word] = odds / math.sqrt(sum(1.0 / number for number in (*having, *without)))
        best = sorted(scores, key=lambda word: (-scores[word], word))
        found.append([word for word in best if scores[word] > 1.0][:WORDS_SHOWN])
    return found


def main_classes(
    labels: np.ndarray, clusters: np.ndarray, count: int, names: Sequence[str] | None
) -> list[list[tuple[str, float]]]:
    """The most frequent classes of each cluster's labelled images, and their fractions, largest first."""
    found = []
    for k in range(count):
        own = labels[(clusters == k) & (labels >= 0)]
        numbers, counts = np.unique(own, return_counts=True)
        order = np.lexsort((numbers, -counts))[:CLASSES_SHOWN]
        found.append([(class_title(int(numbers[i]), names), round(float(counts[i] / len(own)), 4)) for i in order])
    return found


def describe_clusters(partition: Artifact) -> list[list[str]]:
    """Lines about each cluster of a partition: its classes, and its words."""
    return [summary_lines(summary) for summary in json.loads(partition.read(SUMMARY))["clusters"]]


def summary_lines(summary: Mapping[str, Any]) -> list[str]:
    classes = ", ".join(f"{name} {fraction:.0%}" for name, fraction in summary["classes"])
    return [line for line in (classes, ", ".join(summary["words"])) if line]
