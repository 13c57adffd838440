"""Autoencoders: the one place where uint8 images become latents and latents become images again."""

from __future__ import annotations

import json
from copy import deepcopy
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from ..artifacts import UserError
from .block_transform import SIDES, BlockTransform
from .pretrained import EXTRA, first_line, locate
from .tiny_autoencoder import REDUCTION, TinyAutoencoder

# classes of the TAESD family, and whether their blocks at latent resolution look at the whole image
TINY = {"AutoencoderTiny": False, "AutoencoderTinyFlux2": True, "AtollTinyAutoencoder": True}
STOCK = {  # what our class has of the settings of diffusers'
    "in_channels": 3,
    "out_channels": 3,
    "encoder_block_out_channels": [64] * 4,
    "decoder_block_out_channels": [64] * 4,
    "num_encoder_blocks": [1, 3, 3, 3],
    "num_decoder_blocks": [3, 3, 3, 1],
    "act_fn": "relu",
    "upsample_fn": "nearest",
    "upsampling_scaling_factor": 2,
}
TRANSFORMS = {f"dct-{side}": side for side in SIDES}  # without weights of their own: nothing to download


@runtime_checkable
class Autoencoder(Protocol):
    """Images uint8 [B, C, H, W] to latents float32 [B, c, h, w] and back; `id` names it in every manifest.

    Latents here are the autoencoder's own; `LatentConfig` holds the per-channel mean and std that normalize them.
    """

    @property
    def id(self) -> str: ...
    def latent_shape(self, channels: int, size: int) -> tuple[int, int, int]: ...
    def encode(self, images: Tensor) -> Tensor: ...
    def decode(self, latents: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class Pixels:
    """No autoencoder: the latent is the image in [-1, 1]."""

    @property
    def id(self) -> str:
        return "pixels"

    def latent_shape(self, channels: int, size: int) -> tuple[int, int, int]:
        return channels, size, size

    def encode(self, images: Tensor) -> Tensor:
        return to_unit(images)

    def decode(self, latents: Tensor) -> Tensor:
        return to_bytes(latents)


class NetworkAutoencoder:
    """A pretrained network between RGB images in [-1, 1] and its own latents, used wherever its input is.

    It is shared by all who load it, so it never moves: each device gets a copy, once.
    """

    def __init__(self, id: str, network: Codec, channels: int, reduction: int) -> None:
        self.id = id
        self.channels, self.reduction = channels, reduction
        self.network = network.eval().requires_grad_(False).float()
        self._copies = {next(network.parameters()).device: self.network}

    def latent_shape(self, channels: int, size: int) -> tuple[int, int, int]:
        if channels != 3:
            raise UserError(f"--autoencoder {self.id}: takes RGB images, these have {channels} channel; use pixels")
        if size % self.reduction:
            raise UserError(f"--size {size}: {self.id} needs a multiple of {self.reduction}; use another size")
        return self.channels, size // self.reduction, size // self.reduction

    def encode(self, images: Tensor) -> Tensor:
        return self._on(images.device).encode(to_unit(images))

    def decode(self, latents: Tensor) -> Tensor:
        return to_bytes(self._on(latents.device).decode(latents.to(torch.float32)))

    def _on(self, device: torch.device) -> Codec:
        if device not in self._copies:
            with torch.inference_mode(False):  # the first call must not decide what the copy can be used for
                self._copies[device] = deepcopy(self.network).to(device)
        return self._copies[device]


class DiffusersKL(nn.Module):
    """diffusers' AutoencoderKL (Stable Diffusion's, FLUX's ...); the latent is the posterior's mean."""

    def __init__(self, vae: nn.Module) -> None:
        super().__init__()
        self.vae: Any = vae

    def encode(self, images: Tensor) -> Tensor:
        mean: Tensor = self.vae.encode(images).latent_dist.mode()
        return mean

    def decode(self, latents: Tensor) -> Tensor:
        images: Tensor = self.vae.decode(latents).sample
        return images


Codec = TinyAutoencoder | BlockTransform | DiffusersKL  # encode and decode, tensors in [-1, 1] <-> latents


def to_unit(images: Tensor) -> Tensor:
    """uint8 -> float32 in [-1, 1]."""
    return images.to(torch.float32) / 127.5 - 1.0


def to_bytes(images: Tensor) -> Tensor:
    """[-1, 1] -> uint8, rounded and clamped."""
    return ((images.to(torch.float32) + 1.0) * 127.5).round().clamp(0, 255).to(torch.uint8)


def load_autoencoder(name: str) -> Autoencoder:
    """The autoencoder of a name (pixels, dct-4, taef2), a diffusers folder or hub id, or an id from a manifest."""
    if name == "pixels":
        return Pixels()
    if name in TRANSFORMS:
        return _transform(name)
    found = locate(name)
    return _load(found.id, found.folder)


@lru_cache(maxsize=4)
def _transform(name: str) -> NetworkAutoencoder:
    network = BlockTransform(TRANSFORMS[name])
    return NetworkAutoencoder(name, network, len(network.weights), network.side)


@lru_cache(maxsize=4)
def _load(id: str, folder: Path) -> NetworkAutoencoder:
    try:
        settings = json.loads((folder / "config.json").read_bytes())
        kind = settings.get("_class_name")
    except (OSError, ValueError, AttributeError) as error:
        raise UserError(f"{folder}/config.json: missing or not JSON; give a complete diffusers folder") from error
    if kind in TINY:
        return _load_tiny(id, folder, settings, pooled=TINY[kind])
    if kind == "AutoencoderKL":
        return _load_kl(id, folder)
    raise UserError(f"{folder}: holds a {kind}; only AutoencoderKL, AutoencoderTiny and taef2 are read")


def _load_tiny(id: str, folder: Path, settings: dict[str, Any], *, pooled: bool) -> NetworkAutoencoder:
    for key, wanted in STOCK.items():
        if settings.get(key, wanted) != wanted:
            raise UserError(f"{folder}: {key} is {settings[key]!r}, tiny autoencoders we read have {wanted!r}")
    try:
        weights = load_file(folder / "diffusion_pytorch_model.safetensors")
        channels = len(weights["encoder.layers.14.bias"])
        network = TinyAutoencoder(channels, pooled=pooled)
        # strict: TAEF2's weights in the stock class would load and then decode wrongly
        network.load_state_dict({name: value.float() for name, value in weights.items()}, strict=True)
    except (OSError, SafetensorError, KeyError, RuntimeError) as error:
        raise UserError(f"{folder}: its weights are not those of a tiny autoencoder ({first_line(error)})") from error
    network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # 1.4 times as fast on a CPU
    return NetworkAutoencoder(id, network, channels, REDUCTION)


def _load_kl(id: str, folder: Path) -> NetworkAutoencoder:
    try:
        from diffusers import AutoencoderKL
    except ImportError as error:
        raise UserError(f"{folder}: an AutoencoderKL needs an extra: {EXTRA}") from error
    vae: Any = AutoencoderKL.from_pretrained(folder, local_files_only=True, use_safetensors=True)
    reduction = 2 ** (len(vae.config.block_out_channels) - 1)
    return NetworkAutoencoder(id, DiffusersKL(vae), vae.config.latent_channels, reduction)
