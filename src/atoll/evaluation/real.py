"""The real images that generated ones are measured by, as one feature extractor sees them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from ..artifacts import Artifact
from ..data.dataset import LatentDataset
from ..data.index import Index
from ..data.shards import write_shard
from ..data.space import LatentConfig
from ..models.autoencoders import load_autoencoder
from ..models.feature_extractors import FeatureExtractor, load_extractor
from ..models.lpips import LPIPS
from .samples import StoredImages
from .scores import Estimate, Real, Sets, scored
from .scores.sets import COMPARED

DECODED = 64  # images an autoencoder decodes at once
EXTRACTED, EXTRACTED_ON_CPU = 500, 50  # images whose features are computed at once; 500 of a CPU's would take 2 GiB


class RealData:
    """The real images of a data artifact by the features of one extractor, and what is measured against them."""

    def __init__(
        self,
        data: Artifact,
        device: str = "cpu",
        *,
        extractor: str | None = None,
        kept: Path | None = None,
        perceptual: LPIPS | None = None,
    ) -> None:
        """Another `extractor` than the data's own sees the real images as their latents decode, and keeps their
        features in the folder `kept`. With `perceptual` images of one prompt are compared by it, too."""
        index, samples = Index.of(data), LatentDataset.of(data)
        own = data.config["features"]["extractor"]
        self.device = "cpu" if device.startswith("mps") else device  # which has no float64
        self._perceptual = perceptual
        self._extractor = load_extractor(extractor or own, self.device)
        found = (
            samples.features(torch.arange(len(samples)))
            if self.extractor == own
            else decoded_features(data, samples, self._extractor, self.device, kept)
        )
        unseen, train = (torch.from_numpy(index.shuffled(*some)) for some in (("validation", "holdout"), ("train",)))
        features, labels = found.float().to(self.device), torch.from_numpy(index.labels).to(self.device)
        order = torch.cat([unseen, train])
        self.real = Real(features[order], features[train], labels[order])

    @property
    def extractor(self) -> str:
        """The id of the extractor, with the digest of its weights where it has some."""
        return self._extractor.id

    def features_of(self, images: Tensor | StoredImages) -> Tensor:
        """Features float32 [N, D] of images uint8 [N, C, H, W], which are read part by part."""
        size = EXTRACTED_ON_CPU if self.device == "cpu" else EXTRACTED
        starts = range(0, len(images), size)
        return torch.cat([self._extractor.extract(images[at : at + size].to(self.device)) for at in starts]).float()

    def measure(self, images: Tensor | StoredImages, prompts: list[str], labels: np.ndarray) -> dict[str, Estimate]:
        """Every score of one set of generated images. `labels` are the classes that were asked for, -1: none."""
        groups = torch.from_numpy(np.unique(np.array(prompts), return_inverse=True)[1]).to(self.device)
        asked = torch.from_numpy(labels).to(self.device)
        return scored(Sets(self.features_of(images), self.real, images, groups, asked, self._perceptual))

    def baseline(self) -> dict[str, Estimate]:
        """The scores of real images: one half of them as if generated, compared with the other."""
        some, others = (
            Real(self.real.features[side::2], self.real.features[side::2], self.real.labels[side::2]) for side in (0, 1)
        )
        labels = some.labels[:COMPARED]
        groups = labels if bool((labels >= 0).all()) else None
        return scored(Sets(some.features[:COMPARED], others, groups=groups, labels=labels))


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
