"""What to train by default: complete, named configurations, from a laptop to the papers."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from ..artifacts import UserError
from ..diffusion import CosineVP, Kind, LinearFlow, LogitNormal, Objective, Uniform
from ..islands.order import Acceptance
from ..models.dit import DiTConfig
from ..training.config import TrainConfig

# HDDM's two families: epsilon on a cosine schedule favours detail, velocity on the straight path global structure.
# v is the same schedule for networks too small to predict noise well: two of eight cost about 1 % (docs/science.md)
OBJECTIVES: Mapping[str, Objective] = {
    "ddpm": Objective(schedule=CosineVP(), kind=Kind.EPSILON, density=Uniform()),
    "flow": Objective(schedule=LinearFlow(), kind=Kind.VELOCITY, density=LogitNormal()),
    "v": Objective(schedule=CosineVP(), kind=Kind.V, density=Uniform()),
}
MEANINGS = {held.name: held.metadata["help"] for held in fields(DiTConfig)}


class Network(BaseModel):
    """The backbone's free choices; the data decides the rest (latent shape, vocabulary, classes)."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    width: int = Field(gt=0, description=MEANINGS["width"])
    depth: int = Field(gt=0, description=MEANINGS["depth"])
    heads: int = Field(gt=0, description=MEANINGS["heads"])
    patch: int = Field(gt=0, description=MEANINGS["patch"])
    variant: Literal["adaln", "adaln-single"] = Field("adaln-single", description=MEANINGS["variant"])
    activation: Literal["gelu-tanh", "silu"] = Field("gelu-tanh", description=MEANINGS["activation"])
    qk_norm: bool = Field(False, description=MEANINGS["qk_norm"])


class PlanConfig(BaseModel):
    """Everything a plan decides. `training.seed` is the run's; every order draws its own from it."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    objectives: str | None = Field(default=None, description="such as 2ddpm:6flow; none: all flow")
    network: Network
    training: TrainConfig
    objective: dict[str, Objective] = {name: OBJECTIVES[name] for name in ("ddpm", "flow")}
    acceptance: Acceptance = Acceptance()

    @property
    def known(self) -> dict[str, Objective]:
        """Every objective that `objectives` may name, this plan's own before those of all plans."""
        return {**OBJECTIVES, **self.objective}


USUAL_LATENT = (4, 32, 32)  # of 256 px through most autoencoders
DIGITS = "digits"


def digits() -> PlanConfig:
    """The demo: 116 thousand weights, fifteen seconds of one core per expert; docs/log.md has the sweeps behind it."""
    return PlanConfig(
        network=Network(width=48, depth=3, heads=4, patch=4, activation="silu"),
        training=TrainConfig(
            images=96_000, batch=64, learning_rate=1.2e-2, warmup_images=3_200, decay="linear", ema_images=3_200, seed=0
        ),
        objective={
            "ddpm": OBJECTIVES["ddpm"],
            "flow": Objective(schedule=LinearFlow(), kind=Kind.VELOCITY, density=Uniform()),
        },
    )


@dataclass(frozen=True)
class Recipe:
    """A size of expert, and the training that goes with it."""

    description: str
    width: int
    depth: int
    heads: int
    tokens: int  # of an image, at most; larger patches make them fewer
    min_images: int  # of a cluster's training images, for so many weights
    images: int
    batch: int
    learning_rate: float
    largest_patch: int = 16
    qk_norm: bool = False
    decay: Literal["constant", "linear"] = "linear"
    warmup: float = 0.02  # fraction of the budget
    average: float = 0.04  # the same: half-life

    def plan(self, latent: Sequence[int]) -> PlanConfig:
        patch = patch_for(latent, self.tokens, self.largest_patch)
        training = TrainConfig(
            images=self.images,
            batch=self.batch,
            learning_rate=self.learning_rate,
            warmup_images=round(self.warmup * self.images),
            decay=self.decay,
            ema_images=round(self.average * self.images),
            seed=0,
        )
        network = Network(width=self.width, depth=self.depth, heads=self.heads, patch=patch, qk_norm=self.qk_norm)
        return PlanConfig(network=network, training=training)


# from small to large; learning rates fall with the width, and were measured for the first two (docs/log.md).
# `min_images` follows two points: 3M weights suit a cluster of 12,500 photographs (a pilot), 600M a million (HDDM)
RECIPES = {
    "laptop": Recipe("1M weights; an hour for eight on two cores", 128, 4, 4, 64, 0, 200_000, 64, 4e-3),
    "tiny": Recipe(
        "3M weights; minutes on a GPU, hours on a CPU", 192, 6, 3, 64, 2_000, 1_500_000, 128, 3.2e-3,
        warmup=0.04, average=0.02,
    ),
    "small": Recipe("22M, DiT-S; a day on one good card", 384, 12, 6, 256, 20_000, 12_800_000, 128, 2e-4, qk_norm=True),
    "base": Recipe("87M, DiT-B", 768, 12, 12, 256, 100_000, 12_800_000, 128, 1.5e-4, qk_norm=True),
    "large": Recipe("304M, DiT-L", 1024, 24, 16, 256, 400_000, 12_800_000, 128, 1e-4, 2, qk_norm=True),
    # DDM's and HDDM's: no warm-up, EMA 0.9999 per step, which is 32 images x ln 2 / -ln 0.9999 of half-life
    "xl": Recipe(
        "450M, the papers' XL/2", 1152, 28, 16, 256, 1_000_000, 12_800_000, 32, 1e-4, 2,
        decay="constant", warmup=0.0, average=222 / 12_800,
    ),
}  # fmt: skip


def patch_for(latent: Sequence[int], tokens: int, largest: int = 16) -> int:
    """The smallest patch that leaves at most so many tokens, or else the largest that fits."""
    _, height, width = latent
    fitting = [patch for patch in (1, 2, 4, 8, 16) if patch <= largest and not height % patch and not width % patch]
    return next((p for p in fitting if height * width // p**2 <= tokens), fitting[-1])


def recipe(name: str, latent: Sequence[int] = USUAL_LATENT) -> PlanConfig:
    """A recipe by name, for latents of this shape."""
    if name == DIGITS:
        return digits()
    if name not in RECIPES:
        raise UserError(f"--recipe {name}: not known; use one of {', '.join((*RECIPES, DIGITS))}")
    return RECIPES[name].plan(latent)


def suitable_recipes(images: int) -> list[str]:
    """Names of the recipes for a cluster of so many training images, the largest first."""
    return [name for name in reversed(RECIPES) if RECIPES[name].min_images <= images]


def name_for(data: Mapping[str, Any], clusters: int) -> str:
    """The recipe for a data artifact's config, cut into so many clusters, when none is named."""
    images = data["splits"].get("train", 0) // clusters
    return DIGITS if data["source"]["kind"] == "digits" else suitable_recipes(images)[0]


def recipe_for(data: Mapping[str, Any], clusters: int) -> PlanConfig:
    return recipe(name_for(data, clusters), data["latent"]["shape"])


def rescale_hparams(changed: PlanConfig, base: PlanConfig, explicit: Collection[str]) -> PlanConfig:
    """A `base` recipe as the user `changed` it, with what follows from that.

    Warm-up and average keep their fraction of the budget, the learning rate scales with sqrt(batch) / width. Settings
    that are `explicit` (`training.ema_images`) stay.
    """
    kept = {name.removeprefix("training.") for name in explicit}
    old, new = base.training, changed.training
    over = old.over(new.images, kept)
    scale = math.sqrt(new.batch / old.batch) * base.network.width / changed.network.width
    update = {
        "learning_rate": new.learning_rate * scale,
        "warmup_images": over.warmup_images,
        "ema_images": over.ema_images,
    }
    training = new.model_copy(update={k: v for k, v in update.items() if k not in kept})
    return changed.model_copy(update={"training": training})
