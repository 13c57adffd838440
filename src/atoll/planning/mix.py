"""Which cluster trains with which objective."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import torch

from ..artifacts import Artifact, UserError
from ..data.shards import ShardSet

DETAIL_SAMPLES = 256  # latents per cluster; the mean is known well enough


@dataclass(frozen=True)
class Mix:
    """One objective for each cluster: in the order of clusters, or only how many of each, the first-named first.

    `text` is how the user wrote it; None where nobody asked for it, so that islands may change it.
    """

    names: tuple[str, ...]
    by_cluster: bool
    text: str | None

    def allows(self, cluster: int, objective: str, insisted: Sequence[str]) -> bool:
        """Whether an island may insist on an objective for a cluster, after others have `insisted` on theirs."""
        if self.text is None:
            return True
        if self.by_cluster:
            return self.names[cluster] == objective
        return insisted.count(objective) < self.names.count(objective)

    def deal(self, detail: Sequence[float], insisted: Mapping[int, str] = MappingProxyType({})) -> list[str]:
        """The objective of each cluster; `detail` [K] is how much fine structure each one has.

        Clusters whose island insists on an objective have that one, and it counts. Of the rest, the first-named
        goes to the clusters with most detail (HDDM gave those to its noise experts).
        """
        free = [k for k in range(len(self.names)) if k not in insisted]
        if self.by_cluster:
            return [insisted.get(k, name) for k, name in enumerate(self.names)]
        left = list(self.names)
        for objective in insisted.values():
            if objective in left:
                left.remove(objective)
        assert len(left) == len(free) or self.text is None, "an island was let insist on more than the mix has"
        by_detail = sorted(free, key=lambda k: (-detail[k], k))
        chosen = {**insisted, **dict(zip(by_detail, left, strict=False))}
        return [chosen[k] for k in range(len(self.names))]


def usual_mix(clusters: int) -> str:
    """All by flow: experts of other objectives are welcome, but none made a model much better (docs/science.md)."""
    return f"{clusters}flow"


def read_mix(text: str | None, known: Collection[str], clusters: int) -> Mix:
    """`2ddpm:6flow` says how many of each, `ddpm,flow,flow` names the objective of clusters 0, 1, 2."""
    mix = usual_mix(clusters) if text is None else text
    names, counted = names_of(mix)
    for name in names:
        if name not in known:
            raise UserError(f"--mix {mix}: unknown objective {name!r}; use {', '.join(sorted(known))}")
    if len(names) != clusters:
        raise UserError(
            f"--mix {mix}: names {len(names)} experts, the partition has {clusters} clusters; make them equal"
        )
    return Mix(tuple(names), not counted, text)


def names_of(mix: str) -> tuple[list[str], bool]:
    """The objective of every expert that a mix names, and whether they were counted or put in order."""
    if re.fullmatch(r"\d{1,4}[A-Za-z][\w-]*(:\d{1,4}[A-Za-z][\w-]*)*", mix) is None:
        return mix.split(","), False
    parts = [re.fullmatch(r"(\d+)(.+)", part) for part in mix.split(":")]
    return [m[2] for m in parts if m is not None for _ in range(int(m[1]))], True


def detail_of(partition: Artifact, cluster: int) -> float:
    """Mean squared difference of neighbouring latent values: how much fine structure a cluster has."""
    shard = ShardSet([partition.file(f"clusters/{cluster:02d}/train-00000.safetensors")])
    latents = shard.latents(torch.arange(min(len(shard), DETAIL_SAMPLES))).double()
    across, down = latents.diff(dim=-1).square().mean(), latents.diff(dim=-2).square().mean()
    return float(np.round(float(across + down), 12))
