"""The two spaces a network lives in: latents and text. Experts of one ensemble must share both."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from ..artifacts import Artifact


class LatentSpace(BaseModel):
    """Normalised latents: stored = (autoencoder latent - mean) / std, per channel."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    autoencoder: str = Field(description="id of the autoencoder, e.g. pixels")
    shape: tuple[int, int, int] = Field(description="channels, height, width")
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def normalise(self, latents: Tensor) -> Tensor:
        """The autoencoder's latents [N, C, H, W] as networks see them."""
        return (latents - _per_channel(self.mean, latents)) / _per_channel(self.std, latents)

    def restore(self, latents: Tensor) -> Tensor:
        """A network's latents [N, C, H, W] as the autoencoder decodes them."""
        return restored(latents, self.mean, self.std)


def restored(latents: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """Normalised latents [N, C, H, W] back in the autoencoder's own scale, per channel."""
    return latents * _per_channel(std, latents) + _per_channel(mean, latents)


def _per_channel(values: Sequence[float], latents: Tensor) -> Tensor:
    return torch.tensor(values, dtype=latents.dtype, device=latents.device).view(1, -1, 1, 1)


class TextSpace(BaseModel):
    """How captions become a Condition.

    words   `tokens` holds word ids int64 [B, L]; each network learns its own table
    tokens  `tokens` holds embeddings float [B, L, width]
    pooled  `pooled` holds one vector float [B, width]
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    encoder: str = Field(description="id of the text encoder, e.g. words")
    kind: Literal["words", "tokens", "pooled"]
    length: int = Field(gt=0, description="most tokens in a caption")
    width: int | None = Field(None, description="width of an embedding; None for words")
    vocabulary: tuple[str, ...] | None = Field(None, description="the words by id; only for words")


def text_space(data: Artifact) -> TextSpace | None:
    """How the captions of a data artifact become conditions; None if it has no text."""
    text = data.config["text"]
    return None if text is None else TextSpace.model_validate(text)
