"""Which cluster trains with which objective."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType

import numpy as np
import torch

from ..artifacts import Artifact, UserError
from ..data.dataset import LatentDataset
from ..data.space import LatentConfig

ENERGY_SAMPLES = 1024  # latents per cluster: enough to know the mean
COUNTS = re.compile(r"\d{1,4}[A-Za-z][\w-]*(:\d{1,4}[A-Za-z][\w-]*)*")


def objective_names(text: str) -> list[str]:
    """The objective of every expert, of a text such as `2ddpm:6flow`."""
    if COUNTS.fullmatch(text) is None:
        raise UserError(f"--objectives {text}: is no list; write how many of each, such as 2ddpm:6flow")
    return [name for count, name in re.findall(r"(\d+)([^:]+)", text) for _ in range(int(count))]


def assign_objectives(
    text: str | None,
    known: Collection[str],
    energy: Sequence[float],
    fixed: Mapping[int, str] = MappingProxyType({}),
) -> list[str]:
    """The objective of each of K clusters, by --objectives `text`; without it flow, since no mix was much better.

    The first-named goes to the clusters with most high-frequency `energy` [K], as HDDM gave those to its noise
    experts. Clusters whose island has an objective of its own are `fixed`.
    """
    clusters, given = len(energy), f"{len(energy)}flow" if text is None else text
    names = objective_names(given)
    for option, wanted in ((f"--objectives {given}", names), ("--islands", fixed.values())):
        if unknown := [name for name in wanted if name not in known]:
            raise UserError(f"{option}: unknown objective {unknown[0]!r}; use {', '.join(sorted(known))}")
    if len(names) != clusters:
        raise UserError(
            f"--objectives {given}: names {len(names)} experts, the partition has {clusters} clusters; make them equal"
        )
    free = sorted((k for k in range(clusters) if k not in fixed), key=lambda k: (-energy[k], k))
    left = Counter(names) - Counter(fixed.values())
    chosen = {**fixed, **dict(zip(free, left.elements(), strict=False))}
    if text is not None and Counter(chosen.values()) != Counter(names):
        others = ", ".join(f"cluster {k}: {name}" for k, name in sorted(fixed.items()))
        raise UserError(
            f"--objectives {text}: the islands file has others ({others}); change it, or leave out `objective` there"
        )
    return [chosen[k] for k in range(clusters)]


def high_frequency_energy(partition: Artifact, cluster: int, latent: LatentConfig) -> float:
    """Mean squared difference of neighboring latent values of a cluster: how much fine structure it has."""
    samples = LatentDataset.open([partition.file(f"clusters/{cluster:02d}/train-00000.safetensors")], latent)
    latents = samples.latents(torch.arange(min(len(samples), ENERGY_SAMPLES))).double()  # shards are shuffled
    across, down = latents.diff(dim=-1).square().mean(), latents.diff(dim=-2).square().mean()
    return float(np.round(float(across + down), 12))
