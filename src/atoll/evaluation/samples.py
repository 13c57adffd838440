"""Samples as an artifact: the images, and every setting that made them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, Field, SerializerFunctionWrapHandler, model_serializer
from safetensors.torch import load_file, save_file
from torch import Tensor

from ..artifacts import Artifact, Draft, canonical_json, reuse
from ..ensemble.load import Ensemble
from ..ensemble.record import Record
from ..model import Model
from ..sampling import Sampling, image_seeds

KIND = "samples"


class SampleSettings(BaseModel):
    """Everything a set of samples depends on, besides the model."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    prompts: tuple[str, ...] = Field(min_length=1, description="one per image")
    negative_prompt: str | None = Field(None, description="what guidance leads away from, of all images")
    seed: int = Field(0, description="image i uses seed + i")
    sampling: Sampling = Sampling()
    batch: int = Field(250, gt=0)
    threads: int = Field(1, gt=0, description="CPU threads; sums depend on them in the last bit")

    @model_serializer(mode="wrap")
    def _without_nothing(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """There was no negative prompt once, and samples without one keep their digests."""
        content: dict[str, Any] = write(self)
        if self.negative_prompt is None:
            content.pop("negative_prompt", None)
        return content


def write_samples(
    model: Model,
    settings: SampleSettings,
    out: Path,
    *,
    progress: Callable[[int, int], None] | None = None,
) -> Artifact:
    """Paint the images and leave them in `out`: images.safetensors, and samples.json about how they came about.

    What the settings leave open, such as the route, is written down as the model settles it.
    """
    settings = settled(model, settings)
    dumped = settings.model_dump(mode="json")
    config, parents = {"settings": dumped, "pictures": False}, {"model": model.digest}
    if (done := reuse(out, KIND, config, parents)) is not None:
        return done
    torch.set_num_threads(settings.threads)
    seeds = image_seeds(settings.seed, len(settings.prompts))
    who = Record(len(seeds), model.body.version.clusters) if isinstance(model.body, Ensemble) else None
    latents = model.latents(
        settings.prompts,
        seeds,
        settings.sampling,
        negative=settings.negative_prompt,
        batch=settings.batch,
        progress=progress,
        watch=None if who is None else who.add,
    )
    images = model.decode(latents)
    with Draft(out, KIND) as draft:
        save_file({"images": images}, draft.folder / "images.safetensors")
        record: dict[str, Any] = {"model": model.digest, "device": model.device.type, **dumped, "seeds": seeds}
        if isinstance(model.body, Ensemble):
            record["router"] = model.body.router.digest
            record["missing"] = sorted(model.missing)
        if who is not None:
            record["times"], record["experts_at_time"] = who.by_time()
            record["expert_of_image"] = who.by_image().argmax(1).tolist()
        (draft.folder / "samples.json").write_bytes(canonical_json(record) + b"\n")
        return draft.commit(config=config, parents=parents)


def settled(model: Model, settings: SampleSettings) -> SampleSettings:
    """The settings with nothing left open."""
    return settings.model_copy(update={"sampling": model.settled(settings.sampling)})


def read_samples(artifact: Artifact) -> tuple[Tensor, dict[str, Any]]:
    """The images uint8 [N, C, H, W] and the record of how they were made."""
    return load_file(artifact.file("images.safetensors"))["images"], json.loads(artifact.read("samples.json"))
