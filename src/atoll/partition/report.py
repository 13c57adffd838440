"""What the clusters are, for people: clusters.json, partition.html, and a grid of images of each in sheets/NN.png."""

from __future__ import annotations

import base64
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import torch

from ..artifacts import Artifact
from ..data.classes import class_names, class_title
from ..data.contact_sheet import contact_sheet
from ..data.dataset import LatentDataset
from ..data.index import SPLITS, Index
from ..data.text import split_words
from ..models.autoencoders import load_autoencoder
from .methods import PartitionConfig

CLUSTERS_FILE = "clusters.json"
WORDS_SHOWN, CLASSES_SHOWN = 8, 6
CAPTIONED = 100_000  # training samples whose captions are read
SIGNIFICANT = 2.0  # standard errors
SHEET_IMAGES = 40  # five rows; each has to be decoded from its latent
# of clusters in turn: told apart by people who see red and green alike
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#b8860b", "#4a3f8f", "#56a0c9", "#7a7a7a")


def summarize(data: Artifact, index: Index, clusters: np.ndarray, config: PartitionConfig) -> dict[str, Any]:
    """The content of clusters.json: of each cluster its sizes, main classes and top words; and of them all

    balance  largest over smallest cluster, in training samples
    nmi      normalized mutual information of clusters and labels, 0: unrelated, 1: the same; None where fewer than
             half of the training samples have a label, or all have the same one
    """
    train = index.rows("train")
    captioned = index.shuffled("train", seed=config.seed)[:CAPTIONED]
    words = top_words(index.captions_of(captioned), clusters[captioned], config.clusters)
    names = class_names(data)
    table: list[dict[str, Any]] = []
    for k in range(config.clusters):
        member = clusters == k
        sizes = {split: int((member & (index.splits == split)).sum()) for split in SPLITS}
        classes = main_classes(index.labels[train[member[train]]], names)
        table.append({**sizes, "classes": classes, "words": words[k]})
    counts = [cluster["train"] for cluster in table]
    return {
        "clusters": table,
        "balance": round(max(counts) / max(min(counts), 1), 4),
        "nmi": agreement(index.labels[train], clusters[train]),
    }


def agreement(labels: np.ndarray, clusters: np.ndarray) -> float | None:
    """nmi, rounded so that it is the same on another machine."""
    from sklearn.metrics import normalized_mutual_info_score  # takes a second to import

    known = labels >= 0
    if 2 * known.sum() <= len(labels) or len(np.unique(labels[known])) < 2:
        return None
    return round(float(normalized_mutual_info_score(labels[known], clusters[known])), 4)


def top_words(captions: Sequence[Sequence[str]], clusters: np.ndarray, count: int) -> list[list[str]]:
    """The words that set each cluster's images apart, by a test of two proportions.

    The fraction of images that have the word in a caption, inside and outside, in standard errors of the difference.
    """
    inside: list[Counter[str]] = [Counter() for _ in range(count)]
    images = np.zeros(count)
    for texts, k in zip(captions, clusters.tolist(), strict=True):
        inside[k].update({word for text in texts for word in split_words(text)})
        images[k] += bool(texts)
    everything, total = sum(inside, Counter()), images.sum()
    found = []
    for counts, here in zip(inside, images, strict=True):
        scores, there = {}, total - here
        for word, number in counts.items():
            p = everything[word] / total
            error = np.sqrt(p * (1 - p) * (1 / here + 1 / there)) if 0 < p < 1 and there else np.inf
            scores[word] = (number / here - (everything[word] - number) / max(there, 1)) / error
        best = sorted(scores, key=lambda word: (-scores[word], word))
        found.append([word for word in best if scores[word] > SIGNIFICANT][:WORDS_SHOWN])
    return found


def main_classes(labels: np.ndarray, names: Sequence[str] | None) -> list[tuple[str, float]]:
    """The most frequent classes of a cluster's labelled images, and their fractions, largest first."""
    numbers, counts = np.unique(labels[labels >= 0], return_counts=True)
    order = np.lexsort((numbers, -counts))[:CLASSES_SHOWN]
    return [(class_title(int(numbers[i]), names), round(float(counts[i] / counts.sum()), 4)) for i in order]


def read_clusters(partition: Artifact) -> dict[str, Any]:
    return dict(json.loads(partition.read(CLUSTERS_FILE)))


def description(cluster: Mapping[str, Any]) -> list[str]:
    """Lines about a cluster of clusters.json: its classes, and its words."""
    classes = ", ".join(f"{name} {fraction:.0%}" for name, fraction in cluster["classes"])
    return [line for line in (classes, ", ".join(cluster["words"])) if line]


def write_report(
    folder: Path,
    data: Artifact,
    samples: LatentDataset,
    index: Index,
    clusters: np.ndarray,
    config: PartitionConfig,
    summary: Mapping[str, Any],
) -> None:
    """Write sheets/NN.png, of random training samples, and partition.html, which contains them."""
    autoencoder, rows = load_autoencoder(samples.latent.autoencoder), index.shuffled("train", seed=config.seed)
    (folder / "sheets").mkdir()
    shown, total = [], sum(cluster["train"] for cluster in summary["clusters"])
    for k, cluster in enumerate(summary["clusters"]):
        chosen = torch.from_numpy(rows[clusters[rows] == k][:SHEET_IMAGES])
        latents = samples.latent.denormalize(samples.latents(chosen))
        with torch.inference_mode():
            images = torch.cat([autoencoder.decode(part) for part in latents.split(8)])  # what a core's cache holds
        sheet = folder / "sheets" / f"{k:02d}.png"
        contact_sheet(images.numpy()).save(sheet)
        shown.append(
            {
                **cluster,
                "number": k,
                "fraction": cluster["train"] / total,
                "color": COLORS[k % len(COLORS)],
                "lines": description(cluster),
                "sheet": base64.b64encode(sheet.read_bytes()).decode(),
            }
        )
    source = resources.files(__package__).joinpath("report.html").read_text()
    features = None if config.method in ("label", "random") else data.config["features"]["extractor"]
    title = f"{config.clusters} clusters of {data.config['count']:,} images"
    page = jinja2.Environment(autoescape=True).from_string(source)
    (folder / "partition.html").write_text(
        page.render(title=title, config=config, features=features, summary=summary, clusters=shown)
    )
