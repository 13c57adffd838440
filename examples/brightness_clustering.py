"""Cluster images by brightness: a clustering method in one file.

    atoll prepare photos --features pixels --out runs/photos/data
    atoll partition runs/photos/data --method brightness --plugin examples/brightness_clustering.py -k 4

Features of `pixels` are the downsampled images, so the mean of an image's features grows with its brightness. The
clusters are ranges of brightness with equally many training images each.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from pydantic import Field

from atoll.artifacts import UserError
from atoll.partition.methods import Array, Method, State, clustering


@clustering("brightness")
class Brightness(Method):
    """State: edges float64 [K - 1], the mean features between two clusters."""

    gamma: float = Field(default=1.0, gt=0, description="an option: --set options.gamma=2.2")

    def fit(self, features: Array, labels: Array, ids: Sequence[str], clusters: int, seed: int) -> State:
        edges = np.quantile(self.brightness(features), np.arange(1, clusters) / clusters)
        if len(np.unique(edges)) < len(edges):
            raise UserError(f"-k {clusters}: too few different brightnesses; use a smaller -k")
        return {"edges": edges}

    def assign(self, state: State, features: Array, labels: Array, ids: Sequence[str]) -> Array:
        return np.searchsorted(state["edges"], self.brightness(features), side="right")

    def brightness(self, features: Array) -> Array:
        return features.mean(1, dtype=np.float64).clip(min=0) ** self.gamma
