"""A router on disk: model.safetensors, router.json, metrics.jsonl, accuracy.json, manifest.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from ..artifacts import Artifact, Store
from ..data.space import LatentConfig, TextConfig
from ..diffusion import Condition
from ..models.router import Router, RouterConfig, build_router, cluster_weights
from ..training.result import WEIGHTS, Result, read_card, read_network

KIND = "router"


class RouterCard(BaseModel):
    """router.json. Cluster k of `partition` is expert k's."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    schema_version: Literal[1] = 1
    architecture: RouterConfig
    latent: LatentConfig
    text: TextConfig | None = None
    partition: str = Field(description="digest of the partition whose clusters it tells apart")
    images: int = Field(ge=0)
    license: str | None = None


@dataclass(frozen=True)
class TrainedRouter:
    """A router ready for a mixture: (x, t, condition) -> weights [B, K], float32, rows summing to one."""

    card: RouterCard
    network: Router
    digest: str

    def __call__(self, x: Tensor, t: Tensor, condition: Condition | None) -> Tensor:
        return cluster_weights(self.network, self.card.architecture.trunk.time_scale, x, t, condition)


def router_result(card: RouterCard, config: Mapping[str, Any], extra: Mapping[str, bytes]) -> Result:
    """What makes a finished training a router: its card, `extra` files and the manifest's config."""
    return Result(config, card.license, {"router.json": card.model_dump_json(indent=2).encode() + b"\n", **extra})


def read_router_card(artifact: Artifact) -> RouterCard:
    return read_card(artifact, "router.json", RouterCard)


def load_router(place: str | Path | Store, device: torch.device | str = "cpu") -> TrainedRouter:
    """Read a router, checking digests, names, shapes, dtypes and that every weight is finite."""
    artifact = Artifact.open(place, KIND)
    card = read_router_card(artifact)
    network = read_network(
        lambda: build_router(card.architecture), card.architecture.trunk, artifact.file(WEIGHTS), device
    )
    return TrainedRouter(card, network, artifact.digest)
