"""Router networks: which cluster does a noisy latent come from?

    noisy latent + time + condition  ->  logits [B, K] of p(cluster | x_t, t, condition)

`dit`, the default, is a diffusion transformer's trunk with one learned class token in front [DDM]; its blocks are
dit.py's. Another architecture is a class with the same two methods under `@router("name")`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor, nn

from ..diffusion.condition import Condition
from .dit import Block, Conditioning, DiTConfig, Head, Patches, initialize


@dataclass(frozen=True, kw_only=True)
class RouterConfig:
    """An architecture, its sizes and what it reads (the trunk), and how many clusters to tell apart.

    A trunk with condition "none" is a blind router.
    """

    trunk: DiTConfig
    clusters: int = field(metadata={"help": "to tell apart: the partition's"})
    name: str = field(default="dit", metadata={"help": "architecture of the network"})

    def __post_init__(self) -> None:
        if self.clusters < 1:
            raise ValueError(f"clusters must be at least 1, got {self.clusters}")
        if self.trunk.out_channels is not None:
            raise ValueError("trunk.out_channels has no meaning for a router; leave it out")
        if self.name not in ROUTERS:
            raise ValueError(f"name must be one of {', '.join(ROUTERS)}, got {self.name!r}")


class Router(nn.Module):
    """(x [B, C, H, W], time [B], condition) -> logits [B, K], equal before training; `time` is trunk.time_scale * t."""

    blocks: nn.ModuleList  # its repeated part, compiled and checkpointed one by one; it may be empty

    def __init__(self, config: RouterConfig, generator: torch.Generator | None = None) -> None:
        super().__init__()
        self.config = config

    def forward(self, x: Tensor, time: Tensor, condition: Condition | None = None) -> Tensor:
        raise NotImplementedError


ROUTERS: dict[str, type[Router]] = {}
Class = TypeVar("Class", bound=type[Router])


def router(name: str) -> Callable[[Class], Class]:
    """Register an architecture: RouterConfig(name=...) then builds it."""

    def register(network: Class) -> Class:
        ROUTERS[name] = network
        return network

    return register


def build_router(config: RouterConfig, generator: torch.Generator | None = None) -> Router:
    return ROUTERS[config.name](config, generator)


@router("dit")
class DiTRouter(Router):
    """A DiT with a class token instead of an output for each patch."""

    def __init__(self, config: RouterConfig, generator: torch.Generator | None = None) -> None:
        super().__init__(config)
        self.patches = Patches(config.trunk)
        self.conditioning = Conditioning(config.trunk)
        self.class_token = nn.Parameter(torch.empty(config.trunk.width))
        self.blocks = nn.ModuleList(Block(config.trunk) for _ in range(config.trunk.depth))
        self.head = Head(config.trunk, outputs=config.clusters)
        initialize(self, config.trunk, generator)
        if not self.class_token.is_meta:
            nn.init.normal_(self.class_token, std=0.02, generator=generator)

    def forward(self, x: Tensor, time: Tensor, condition: Condition | None = None) -> Tensor:
        vector, signal, text, mask = self.conditioning(time, condition)
        h = self.patches(x)
        first = self.class_token.to(h.dtype).expand(len(h), 1, -1)
        h = torch.cat([first, h], dim=1)
        for block in self.blocks:
            h = block(h, signal, text, mask)
        wide = self.head.project.weight.dtype  # runtime/routing.py keeps the head in float32
        logits: Tensor = self.head(h[:, :1].to(wide), vector.to(wide))
        return logits.squeeze(1).to(x.dtype)


def cluster_weights(network: nn.Module, time_scale: float, x: Tensor, t: Tensor, condition: Condition | None) -> Tensor:
    """p(cluster | x_t, t, condition) as a router network predicts it: float32 [B, K], rows summing to one."""
    logits: Tensor = network(x, t * time_scale, condition)
    return torch.softmax(logits.float(), dim=1)
