"""The two spaces a network lives in: latents and text. Experts of one ensemble must share both."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor

from ..artifacts import Artifact
from ..models.autoencoders import to_bytes, to_unit

DIGITS = 6  # of a preview map: far more than a pixel shows, far fewer than differ between two machines
WEAKEST = 1e-9  # directions of the latents with less of the strongest one's variance are left out of the map


class PreviewMap(BaseModel):
    """Pixel values in [-1, 1] from the normalized latent z at the same place: weights z + bias."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
    weights: tuple[tuple[float, ...], ...] = Field(description="one row per image channel, of one value per latent's")
    bias: tuple[float, ...] = Field(description="one value per image channel")

    def __call__(self, latents: Tensor) -> Tensor:
        """Normalized latents [N, C, H, W] to images [N, 1 or 3, H, W]."""
        weights = torch.tensor(self.weights, dtype=latents.dtype, device=latents.device)
        return torch.einsum("ic,nchw->nihw", weights, latents) + _per_channel(self.bias, latents)


class LatentConfig(BaseModel):
    """Normalized latents: (autoencoder latent - mean) / scale, per channel. `preview` is how they look."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    autoencoder: str = Field(description="id of the autoencoder, e.g. pixels")
    shape: tuple[int, int, int] = Field(description="channels, height, width")
    mean: tuple[float, ...]
    scale: tuple[float, ...]
    preview: PreviewMap | None = None

    @model_validator(mode="after")
    def _preview_fits(self) -> LatentConfig:
        if self.preview is not None:
            rows = {len(row) for row in self.preview.weights}
            if rows != {self.shape[0]} or not len(self.preview.weights) == len(self.preview.bias) in (1, 3):
                raise ValueError(f"preview does not make images of 1 or 3 channels from {self.shape[0]}")
        return self

    def same_space(self, other: LatentConfig) -> bool:
        """Whether networks of both can work together: all is equal but the preview."""
        return self.model_copy(update={"preview": None}) == other.model_copy(update={"preview": None})

    def normalize(self, latents: Tensor) -> Tensor:
        """The autoencoder's latents [N, C, H, W] as networks see them."""
        return (latents - _per_channel(self.mean, latents)) / _per_channel(self.scale, latents)

    def denormalize(self, latents: Tensor) -> Tensor:
        """A network's latents [N, C, H, W] as the autoencoder decodes them."""
        return denormalize(latents, self.mean, self.scale)

    def previews(self, latents: Tensor) -> Tensor:
        """A network's latents [N, C, H, W] as small images uint8 [N, 1 or 3, H, W], without the autoencoder.

        Without a preview map the first three channels are shown, two standard deviations either side.
        """
        if self.preview is not None:
            return to_bytes(self.preview(latents))
        return to_bytes(0.5 * latents[:, : 3 if latents.shape[1] >= 3 else 1])


def denormalize(latents: Tensor, mean: Sequence[float], scale: Sequence[float]) -> Tensor:
    """Normalized latents [N, C, H, W] back in the autoencoder's own units, per channel."""
    return latents * _per_channel(scale, latents) + _per_channel(mean, latents)


def _per_channel(values: Sequence[float], latents: Tensor) -> Tensor:
    return torch.tensor(values, dtype=latents.dtype, device=latents.device).view(1, -1, 1, 1)


def scale_of(mean: np.ndarray, std: np.ndarray) -> np.ndarray:
    """What latents are divided by per channel [C]: their standard deviation; 1 where they are constant."""
    return np.where(std <= 1e-6 * np.maximum(np.abs(mean), 1e-6), 1.0, std)


def fit_preview(latents: Tensor, images: Tensor) -> PreviewMap:
    """The linear map from normalized latents [N, C, H, W] to images uint8 [N, 1 or 3, S, S], by least squares.

    The images are averaged down to the size of the latents.
    """
    small = F.adaptive_avg_pool2d(to_unit(images).double(), (latents.shape[-2], latents.shape[-1]))
    f = latents.double().transpose(0, 1).flatten(1)
    f = torch.cat([f, torch.ones_like(f[:1])])  # [C + 1, places]
    y = small.transpose(0, 1).flatten(1)
    solved = np.linalg.lstsq((f @ f.T).numpy(), (f @ y.T).numpy(), rcond=WEAKEST)[0].round(DIGITS)
    return PreviewMap(weights=tuple(map(tuple, solved[:-1].T.tolist())), bias=tuple(solved[-1].tolist()))


class TextConfig(BaseModel):
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


def text_space(data: Artifact) -> TextConfig | None:
    """How the captions of a data artifact become conditions; None if it has no text."""
    text = data.config["text"]
    return None if text is None else TextConfig.model_validate(text)
