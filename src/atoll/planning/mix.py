"""Which cluster trains with which objective."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

import numpy as np
import torch

from ..artifacts import Artifact, UserError
from ..data.shards import ShardSet

DETAIL_SAMPLES = 256  # latents per cluster; the mean is known well enough


def assign_objectives(mix: str | None, known: Collection[str], detail: Sequence[float]) -> list[str]:
    """The objective's name for each cluster; `detail` [K] is how much fine structure each cluster has.

    `2ddpm:6flow` deals the first-named objective out to the clusters with most detail (HDDM gave those to its
    noise experts); `ddpm,flow,flow` names the objective of clusters 0, 1, 2.
    """
    clusters = len(detail)
    if mix is None:
        few = max(1, round(clusters / 4)) if clusters > 1 else 0
        mix = f"{few}ddpm:{clusters - few}flow" if few else "1flow"
    if re.fullmatch(r"\d+[A-Za-z][\w-]*(:\d+[A-Za-z][\w-]*)*", mix):
        parts = [re.fullmatch(r"(\d+)(.+)", part) for part in mix.split(":")]
        counted = [(int(m[1]), m[2]) for m in parts if m is not None]
        names = [name for count, name in counted for _ in range(count)]
        by_detail = sorted(range(clusters), key=lambda k: (-detail[k], k))
    else:
        names = mix.split(",")
        by_detail = list(range(clusters))
    for name in names:
        if name not in known:
            raise UserError(f"--mix {mix}: unknown objective {name!r}; use {', '.join(sorted(known))}")
    if len(names) != clusters:
        raise UserError(
            f"--mix {mix}: names {len(names)} experts, the partition has {clusters} clusters; make them equal"
        )
    chosen = [""] * clusters
    for cluster, name in zip(by_detail, names, strict=True):
        chosen[cluster] = name
    return chosen


def detail_of(partition: Artifact, cluster: int) -> float:
    """Mean squared difference of neighbouring latent values: how much fine structure a cluster has."""
    shard = ShardSet([partition.file(f"clusters/{cluster:02d}/train-00000.safetensors")])
    latents = shard.latents(torch.arange(min(len(shard), DETAIL_SAMPLES))).double()
    across, down = latents.diff(dim=-1).square().mean(), latents.diff(dim=-2).square().mean()
    return float(np.round(float(across + down), 12))
