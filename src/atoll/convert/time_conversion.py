"""Exact changes of what a network's time and output mean: the same function in our convention."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from ..models.dit import DiTConfig, time_frequencies
from .imported import ImportedNetwork

HEAD = ("head.project.weight", "head.project.bias")


def reverse_time(network: ImportedNetwork) -> ImportedNetwork:
    """A network called with 1 - t becomes one called with t, and its velocity changes sign.

    The embedding of 1 - t is a fixed rotation of the embedding of t, frequency by frequency,

        cos w(1 - t) = cos w cos wt + sin w sin wt,    sin w(1 - t) = sin w cos wt - cos w sin wt,

    so the first layer of the time embedder absorbs it. `d/dt` turns around, so the last layer is negated.
    """
    assert network.config.time_scale == 1.0, "the rotation is for networks that take t unscaled"
    enter = "conditioning.time.enter.weight"
    frequencies = time_frequencies(network.config.frequency_shift, torch.device("cpu")).double()
    by_cos, by_sin = network.weights[enter].double().chunk(2, dim=1)
    cos, sin = frequencies.cos(), frequencies.sin()
    rotated = torch.cat([by_cos * cos + by_sin * sin, by_cos * sin - by_sin * cos], dim=1)
    network = network.derive({enter: rotated.float()}, "time runs the other way: a rotation of the embedding")
    return network.derive({key: -network.weights[key] for key in HEAD}, "negated: the velocity points the other way")


def keep_mean(network: ImportedNetwork) -> ImportedNetwork:
    """Drop the output channels beyond the latent's: DiT, SiT and PixArt predict a variance there."""
    config = network.config
    channels = config.latent[0]
    if config.channels_out == channels:
        return network
    changed = {}
    for key in HEAD:
        old = network.weights[key]
        per_channel = old.reshape(config.patch**2, config.channels_out, *old.shape[1:])
        changed[key] = per_channel[:, :channels].flatten(0, 1).contiguous()
    note = f"output channels {channels} to {config.channels_out - 1} dropped (learned variance)"
    return replace(network.derive(changed, note), config=replace(config, out_channels=None))


def null_vector(config: DiTConfig, weights: Mapping[str, Tensor]) -> Tensor:
    """What the null condition adds to the time embedding, float64 [D]."""
    if config.condition in ("labels", "words"):
        return weights[f"conditioning.{config.condition}.weight"][-1].double()
    if config.condition == "pooled":
        null = weights["conditioning.null_text"].double()
        hidden = F.gelu(_linear(weights, "conditioning.text.enter", null), approximate="tanh")
        return _linear(weights, "conditioning.text.leave", hidden)
    return torch.zeros(config.width, dtype=torch.float64)


def time_features(config: DiTConfig, weights: Mapping[str, Tensor], t: Tensor) -> Tensor:
    """Hidden values of the time embedder at t [T]: float64 [T, D]."""
    angles = (config.time_scale * t.double())[:, None] * time_frequencies(config.frequency_shift, t.device).double()
    return F.silu(_linear(weights, "conditioning.time.enter", torch.cat([angles.cos(), angles.sin()], dim=1)))


def null_conditioning(config: DiTConfig, weights: Mapping[str, Tensor], t: Tensor) -> Tensor:
    """The conditioning vector of an unconditional call at t [T]: float64 [T, D]."""
    time = _linear(weights, "conditioning.time.leave", time_features(config, weights, t))
    return time + null_vector(config, weights)


def _linear(weights: Mapping[str, Tensor], layer: str, x: Tensor) -> Tensor:
    return F.linear(x, weights[f"{layer}.weight"].double(), weights[f"{layer}.bias"].double())
