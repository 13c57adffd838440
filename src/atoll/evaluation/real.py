"""What generated images are held against: the real features and labels, as a whole and cluster by cluster."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from ..artifacts import Artifact, UserError
from ..data.classes import class_names, class_title
from ..data.dataset import LatentDataset
from ..data.index import SPLITS, Index
from ..data.shards import write_shard
from ..data.space import LatentConfig
from ..models.autoencoders import load_autoencoder
from ..models.feature_extractors import FeatureExtractor, load_extractor
from ..models.lpips import LPIPS
from ..partition.assignment import clusters_of
from .metrics import Classifier, Features, frechet_distance
from .samples import StoredImages, spaced
from .scores import Sets, scored, with_intervals
from .scores.estimate import Estimate, within_spread
from .scores.frechet import FrechetReference, moments
from .scores.nearest import nearest_distances

FEWEST = 8  # samples to measure anything by
ENOUGH_UNSEEN = 1000  # images kept from training, to stand for the data
DECODED = 64  # images an autoencoder decodes at once
EXTRACTED, EXTRACTED_ON_CPU = 500, 50  # images whose features are computed at once; 500 of a CPU's would take 2 GiB
ALONE = 5000  # training images whose nearest other one is looked for: a median needs no more
PAINTED_EACH = 4  # images of one prompt, where there are more prompts than can be painted often
APART = ("frechet",)  # scores that are not taken with the others: it has an interval and a reference of its own


class RealData:
    """The real features and labels, and everything that is measured against them."""

    def __init__(
        self,
        data: Artifact,
        scale: float,
        *,
        device: str = "cpu",
        resamples: int = 20,
        count: int | None = None,
        partition: Artifact | None = None,
        extractor: str | None = None,
        kept: Path | None = None,
        perceptual: LPIPS | None = None,
    ) -> None:
        """`count` is the number of samples that will be measured, if they may be fewer than the features.

        With a `partition` every score is also taken cluster by cluster. Another `extractor` than the data's own sees
        the real images as its autoencoder gives them back; what it has seen is kept in the folder `kept`. `perceptual`
        also looks at how far images of one prompt are apart.
        """
        index = Index.of(data)
        samples = LatentDataset.of(data)
        self._device, self._resamples, self._perceptual = device, resamples, perceptual
        own = data.config["features"]["extractor"]
        self._extractor = load_extractor(extractor or own, device)
        self._scale = scale
        found = (
            samples.features(torch.arange(len(samples))).float()
            if self.extractor == own
            else decoded_features(data, samples, self._extractor, device, kept)
        )
        self.features: Features = found.numpy() * np.float32(scale)
        self.directions = None if count is None else self.directions_for(count)
        self._axes = None if self.directions is None else principal_axes(self.features, self.directions)
        # in random order: parts of them are taken for random samples
        self.train = self.features[index.shuffled("train")]
        self._all, unseen = index.shuffled(*SPLITS), index.shuffled("validation", "holdout")
        # neighbourhoods and kernels are looked at among images no training has seen, if they are enough
        self._unseen = unseen if len(unseen) >= ENOUGH_UNSEEN else self._all
        self.labels = index.labels
        # what a prompt is to networks of this data: a caption, or where they read none, a class
        self._prompts = index.captions
        if data.config["text"] is None and data.config["labels"] is not None:
            names = class_names(data)
            self._prompts = [[] if label < 0 else [class_title(label, names)] for label in self.labels.tolist()]
        labelled = self.labels >= 0  # repeats with conflicting labels have none, and are left out
        self.classifier = None
        if 2 * labelled.sum() > len(labelled) and len(np.unique(self.labels[labelled])) > 1:
            self.classifier = Classifier.fitted(self.features[labelled], self.labels[labelled])
        self._clusters = None if partition is None else PromptClusters(self._prompts, clusters_of(index, partition))

    @property
    def extractor(self) -> str:
        """The id of what sees the images here."""
        return self._extractor.id

    @property
    def against(self) -> dict[str, int]:
        """How many real images each measure is held against."""
        return {"frechet": len(self.features), "nearest": len(self.train), "scores": len(self._unseen)}

    def prompts(self, count: int) -> tuple[list[str], np.ndarray | None]:
        """`count` prompts of the data, every different one in turn, with the label each stands for.

        Where classes have so many that few images would be painted for each, some of every class: images of one prompt
        are compared. The label is -1 where only unlabelled samples have the prompt; None for all if one stands for
        several labels.
        """
        label_of: dict[str, set[int]] = {}
        for prompts, label in zip(self._prompts, self.labels.tolist(), strict=True):
            for prompt in prompts:
                label_of.setdefault(prompt, set()).update([] if label < 0 else [label])
        if not label_of:
            return [""] * count, None
        by_class: dict[float, list[str]] = {}  # as images have their captions: the usual one is first
        for prompt, labels in label_of.items():
            by_class.setdefault(min(labels, default=math.inf), []).append(prompt)
        distinct = some_of_each([by_class[label] for label in sorted(by_class)], count)
        chosen = [distinct[i % len(distinct)] for i in range(count)]
        if self.classifier is None or any(len(labels) > 1 for labels in label_of.values()):
            return chosen, None
        return chosen, np.array([min(label_of[prompt], default=-1) for prompt in chosen])

    def directions_for(self, count: int) -> int | None:
        """How many principal directions of the real features a distance of `count` samples is taken in; None: in all.

        A covariance of fewer samples than features is singular, and a distance would measure that. Four samples for
        each direction tell its width. Pixels are taken whole: they are what the demo is measured by.
        """
        if count < FEWEST:
            raise UserError(f"-n {count}: too few samples to measure by; paint {FEWEST} or more")
        if self._extractor.id == "pixels" or count > self.features.shape[1]:
            return None
        return count // 4

    def in_directions(self, features: Features) -> Features:
        """Features [N, D], or as many of their principal directions [N, d] as there are samples to measure by."""
        return features if self._axes is None else features @ self._axes

    def measure(
        self, images: Tensor | StoredImages, wanted: np.ndarray | None, prompts: Sequence[str] | None = None
    ) -> dict[str, Any]:
        """Every score of one set of generated images uint8 [N, C, H, W]; `prompts` say which belong together.

        Images are read part by part. With prompts and clusters, `clusters` has the scores of each cluster's prompts.
        """
        features = self.features_of(images)
        where = "cpu" if self._device.startswith("mps") else self._device  # which has no float64
        seen = np.ascontiguousarray(self.in_directions(features.numpy()))
        distance, *resampled = self._reference.distances(seen, self._resamples, seed=0, device=where)
        sets = self._sets(features, prompts, images)
        frechet = within_spread(distance, resampled)
        found = with_intervals(scored(sets, without=APART))
        return {
            **beside(found, "recognised", self._recognised(features.numpy(), wanted)),
            "frechet": distance,
            "frechet_interval": [frechet.low, frechet.high],
            "nearest_median": found["scores"]["nearest_median"],
            "clusters": None if prompts is None else self._by_cluster(sets, features.numpy(), wanted, prompts),
        }

    def features_of(self, images: Tensor | StoredImages) -> Tensor:
        """Features float32 [N, D] of images uint8 [N, C, H, W], as the real ones are, on the CPU."""
        size = EXTRACTED_ON_CPU if self._device == "cpu" else EXTRACTED
        starts = range(0, len(images), size)
        parts = [self._extractor.extract(images[at : at + size].to(self._device)).cpu() for at in starts]
        return torch.cat(parts).float() * self._scale

    def _sets(self, features: Tensor, prompts: Sequence[str] | None, images: Tensor | StoredImages) -> Sets:
        groups = None if prompts is None else self._there(np.unique(np.array(prompts), return_inverse=True)[1])
        apart = None
        if groups is not None and self._perceptual is not None:
            apart = self._perceptual.within_groups(images, groups.tolist()).to(self._device)
        real, train = self._there(self.features[self._unseen]), self._there(self.train)
        return Sets(features.to(self._device), real, train, groups, apart=apart)

    def _there(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self._device)

    def _recognised(self, features: Features, wanted: np.ndarray | None) -> Estimate | None:
        """The share of images that show what was asked for, of those where anybody knows what that is."""
        if self.classifier is None or wanted is None or not (asked := wanted >= 0).any():
            return None
        return self.classifier.share_right(features[asked], wanted[asked])

    def _by_cluster(
        self, sets: Sets, features: Features, wanted: np.ndarray | None, prompts: Sequence[str]
    ) -> list[dict[str, Any]] | None:
        """The scores of each cluster's prompts, against real images of the same prompts; None without prompts."""
        if self._clusters is None or not any(prompts):
            return None
        generated, real = self._clusters.of_prompts(prompts), self._clusters.of_images
        rows = []
        for k in range(self._clusters.count):
            ours, all_theirs = np.flatnonzero(generated == k), np.flatnonzero(real == k)
            theirs = np.flatnonzero(real[self._unseen] == k)  # places among those that no training has seen
            row: dict[str, Any] = {"cluster": k, "samples": len(ours), "real": len(all_theirs), "unseen": len(theirs)}
            fewest = min(len(ours), len(theirs))
            if fewest < FEWEST:
                what = "samples" if len(ours) < FEWEST else "real images kept from training"
                rows.append({**row, "too_few": f"{fewest} {what}; {FEWEST} or more can be measured"})
                continue
            reference, found = self.features[all_theirs], features[ours]
            directions = None if min(len(ours), len(all_theirs)) > features.shape[1] else fewest // 4
            if directions is not None:
                axes = principal_axes(reference, directions)
                reference, found = reference @ axes, found @ axes
            recognised = self._recognised(features[ours], None if wanted is None else wanted[ours])
            scores = with_intervals(scored(sets.part(self._there(ours), self._there(theirs)), without=APART))
            # it has no interval here: resamples in 1,280 directions, cluster by cluster, would take minutes
            row |= {"frechet": frechet_distance(found, reference), "frechet_directions": directions}
            rows.append(row | beside(scores, "recognised", recognised))
        return rows

    @cached_property
    def _reference(self) -> FrechetReference:
        return FrechetReference.of(self.in_directions(self.features))

    def floors(self, count: int) -> dict[str, Any]:
        """What real data scores against real data."""
        features, half = self.in_directions(self.features[self._all]), len(self.features) // 2
        train = self._there(self.train)
        alone = nearest_distances(train[:ALONE], train, leave_one_out=True)
        one, other = self._unseen[::2], self._unseen[1::2]
        groups = None if self.classifier is None else self._there(self.labels[one])
        halves = Sets(self._there(self.features[one]), self._there(self.features[other]), asked=groups)
        return {
            "frechet_half_against_half": frechet_distance(features[:half], features[half:]),
            "frechet_count_against_all": frechet_distance(features[:count], features),
            "nearest_leave_one_out_median": float(np.median(alone.cpu().numpy())),
            "recogniser_accuracy": None if self.classifier is None else self.classifier.accuracy,
            **with_intervals(scored(halves, without=APART)),
        }


def beside(found: dict[str, Any], name: str, value: Estimate | None) -> dict[str, Any]:
    """Numbers of all scores, with one more that stands beside them, and whose interval stands among theirs."""
    ends = {} if value is None else {name: [value.low, value.high]}
    return {**found, name: None if value is None else float(value), "intervals": {**found["intervals"], **ends}}


def decoded_features(
    data: Artifact, samples: LatentDataset, extractor: FeatureExtractor, device: str, kept: Path | None
) -> Tensor:
    """Features float32 [M, D] of the real images, decoded from their latents: what no model of them can surpass.

    Originals are in no artifact. Where latents are pixels these are the originals, scaled and cropped.
    """
    name = "".join(c if c.isalnum() or c in "@-." else "-" for c in f"{data.digest[:12]}-{extractor.id}")
    file = None if kept is None else kept / f"{name}.safetensors"
    if file is not None and file.is_file():
        return load_file(file)["features"]
    space = LatentConfig.model_validate(data.config["latent"])
    autoencoder = load_autoencoder(space.autoencoder)
    parts = []
    for rows in torch.arange(len(samples)).split(DECODED):
        with torch.no_grad():
            images = autoencoder.decode(space.denormalize(samples.latents(rows).to(device)))
            parts.append(extractor.extract(images).float().cpu())
    features = torch.cat(parts)
    if file is not None:
        write_shard(file, {"features": features})
    return features


def some_of_each(classes: Sequence[Sequence[str]], count: int) -> list[str]:
    """Prompts for `count` images: all there are; or of classes that have many, so few that each gets PAINTED_EACH.

    Every class has one at least, if there are so many images. What belongs to one class only, such as captions of
    people's own, has a prompt for every image.
    """
    there = sum(map(len, classes))
    wanted = min(there, count, max(len(classes), count // PAINTED_EACH) if len(classes) > 1 else count)
    if wanted == there or len(classes) == 1:
        return spaced([prompt for some in classes for prompt in sorted(some)], wanted)
    if wanted < len(classes):
        return [some[0] for some in spaced(classes, wanted)]
    left = wanted
    chosen: list[tuple[int, list[str]]] = []
    for place, some in sorted(enumerate(classes), key=lambda one: len(one[1])):  # what small ones leave is for others
        share = min(len(some), left // (len(classes) - len(chosen)))
        chosen.append((place, spaced(some, share)))
        left -= share
    return [prompt for _, some in sorted(chosen) for prompt in some]


class PromptClusters:
    """Which cluster a prompt belongs to: the one most of its images are in.

    A real image counts where its first prompt does, so that generated and real images of a cluster are of the same
    prompts, and their scores are not those of a cut that went through a class.
    """

    def __init__(self, prompts: Sequence[Sequence[str]], clusters: Tensor) -> None:
        """The prompts of every real image, and its cluster int64 [M]."""
        votes: dict[str, Counter[int]] = {}
        for some, cluster in zip(prompts, clusters.tolist(), strict=True):
            for prompt in some:
                votes.setdefault(prompt, Counter())[cluster] += 1
        # of equally many the smaller number: the order of the images says nothing
        self._cluster = {prompt: min(found, key=lambda k: (-found[k], k)) for prompt, found in votes.items()}
        self.count = 1 + int(clusters.max())
        self.of_images = np.array([self._cluster[some[0]] if some else -1 for some in prompts])

    def of_prompts(self, prompts: Sequence[str]) -> np.ndarray:
        """int64 [N], -1 for a prompt no image has."""
        return np.array([self._cluster.get(prompt, -1) for prompt in prompts])


def principal_axes(features: Features, count: int) -> Features:
    """The `count` directions in which features [N, D] vary most, as columns [D, count]."""
    _, vectors = np.linalg.eigh(moments(features)[1])
    return vectors[:, ::-1][:, :count]
