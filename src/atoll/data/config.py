"""How to prepare."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from .sources import SourceConfig


class PrepareConfig(BaseModel):
    """How to prepare. Everything here can change the result, so all of it is in the manifest."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    source: SourceConfig = SourceConfig()
    size: int | None = Field(default=None, gt=0, description="side of the square images; None: the source's own")
    smallest: int | None = Field(default=None, gt=0, description="shortest side accepted; None: half of size")
    autoencoder: str = Field(default="pixels", description="pixels, dct-4, taef2, or a diffusers folder or id")
    features: str | None = Field(default=None, description="pixels, efficientnet-lite0, dinov2; None: the best here")
    text_encoder: str = Field(default="words", description="words, clip:PLACE, t5:PLACE, minilm, or none")
    text: Literal["cache", "online"] = Field(default="cache", description="online: islands embed captions themselves")
    validation: float = Field(default=0.05, ge=0, lt=1, description="share of the samples an island validates on")
    holdout: float = Field(default=0.05, ge=0, lt=1, description="share no island ever sees")
    batch: int | None = Field(
        default=None, gt=0, description="images per call of an encoder, part of the last bits; None: 16, on a GPU 256"
    )
    license: str | None = Field(default=None, description="license of the images, recorded in all that is made of them")
    threads: int = Field(default=1, gt=0, description="CPU threads per worker; part of the result's last bits")
