"""What to train by default: complete, named configurations, from a laptop to the papers."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from ..artifacts import UserError
from ..diffusion import CosineVP, Kind, LinearFlow, LogitNormal, Objective, Uniform
from ..islands.order import Acceptance
from ..models.dit import DiTConfig
from ..training.config import TrainConfig

# HDDM's two families: epsilon on a cosine schedule favors detail, velocity on the straight path global structure.
# v is the same schedule for networks too small to predict noise well: two of eight cost about 1 % (docs/science.md)
OBJECTIVES: Mapping[str, Objective] = {
    "ddpm": Objective(schedule=CosineVP(), kind=Kind.EPSILON, density=Uniform()),
    "flow": Objective(schedule=LinearFlow(), kind=Kind.VELOCITY, density=LogitNormal()),
    "v": Objective(schedule=CosineVP(), kind=Kind.V, density=Uniform()),
}
MEANINGS = {held.name: held.metadata["help"] for held in fields(DiTConfig)}
USUAL_LATENT = (4, 32, 32)  # of 256 px through most autoencoders
DIGITS = "digits"


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


@dataclass(frozen=True)
class Recipe:
    """A size of expert, and the training that goes with it."""

    description: str
    min_images: int  # of a cluster's training images, for so many weights
    tokens: int  # of an image, at most; larger patches make them fewer
    network: Network  # its patch follows from the latents
    training: TrainConfig


def network(width: int, depth: int, heads: int, *, qk_norm: bool = True) -> Network:
    return Network(width=width, depth=depth, heads=heads, patch=1, qk_norm=qk_norm)


def training(
    images: int, batch: int, rate: float, *, warmup: float = 0.02, average: float = 0.04, linear: bool = True
) -> TrainConfig:
    """Warm-up and half-life of the average are fractions of the budget."""
    return TrainConfig(
        images=images,
        batch=batch,
        learning_rate=rate,
        warmup_images=round(warmup * images),
        decay="linear" if linear else "constant",
        ema_images=round(average * images),
        seed=0,
    )


# from small to large; learning rates fall with the width, and were measured for the first two.
# `min_images` follows two points: 3M weights suit a cluster of 12,500 photographs (a pilot), 600M a million (HDDM)
RECIPES = {
    "laptop": Recipe(
        "1M weights; an hour for eight on two cores", 0, 64, network(128, 4, 4, qk_norm=False),
        training(200_000, 64, 4e-3),
    ),
    "tiny": Recipe(
        "3M weights; minutes on a GPU, hours on a CPU", 2_000, 64, network(192, 6, 3, qk_norm=False),
        training(1_500_000, 128, 3.2e-3, warmup=0.04, average=0.02),
    ),
    "small": Recipe(
        "22M, DiT-S; a day on one good GPU", 20_000, 256, network(384, 12, 6), training(12_800_000, 128, 2e-4)
    ),
    "base": Recipe("87M, DiT-B", 100_000, 256, network(768, 12, 12), training(12_800_000, 128, 1.5e-4)),
    "large": Recipe("304M, DiT-L", 400_000, 256, network(1024, 24, 16), training(12_800_000, 128, 1e-4)),
    # DDM's and HDDM's: no warm-up, EMA 0.9999 per step, which is 32 images x ln 2 / -ln 0.9999 of half-life
    "xl": Recipe(
        "450M, the papers' XL/2", 1_000_000, 256, network(1152, 28, 16),
        training(12_800_000, 32, 1e-4, warmup=0.0, average=222 / 12_800, linear=False),
    ),
}  # fmt: skip
# the demo: 116 thousand weights, fifteen seconds of one core per expert
DEMO = PlanConfig(
    network=Network(width=48, depth=3, heads=4, patch=4, activation="silu"),
    training=training(96_000, 64, 1.2e-2, warmup=1 / 30, average=1 / 30),
    objective={"ddpm": OBJECTIVES["ddpm"], "flow": replace(OBJECTIVES["flow"], density=Uniform())},
)


def patch_for(latent: Sequence[int], tokens: int) -> int:
    """The smallest patch that leaves at most so many tokens, or else the largest that fits."""
    _, height, width = latent
    fitting = [patch for patch in (1, 2, 4, 8, 16) if not height % patch and not width % patch]
    return next((p for p in fitting if height * width // p**2 <= tokens), fitting[-1])


def recipe(name: str, latent: Sequence[int] = USUAL_LATENT) -> PlanConfig:
    """A recipe by name, for latents of this shape."""
    if name == DIGITS:
        return DEMO
    if name not in RECIPES:
        raise UserError(f"--recipe {name}: not known; use one of {', '.join((*RECIPES, DIGITS))}")
    chosen = RECIPES[name]
    patch = patch_for(latent, chosen.tokens)
    return PlanConfig(network=chosen.network.model_copy(update={"patch": patch}), training=chosen.training)


def suitable_recipes(images: int) -> list[str]:
    """Names of the recipes for a cluster of so many training images, the largest first."""
    return [name for name in reversed(RECIPES) if RECIPES[name].min_images <= images]


def name_for(data: Mapping[str, Any], clusters: int) -> str:
    """The recipe for a data artifact's config, cut into so many clusters, when none is named."""
    images = data["splits"].get("train", 0) // clusters
    return DIGITS if data["source"]["kind"] == "digits" else suitable_recipes(images)[0]


def rescale_hparams(changed: PlanConfig, base: PlanConfig, explicit: Collection[str]) -> PlanConfig:
    """A `base` recipe as the user `changed` it, with what follows from that.

    Warm-up and average keep their fraction of the budget, the learning rate scales with sqrt(batch) / width. Settings
    that are `explicit` (`training.ema_images`) stay.
    """
    old, new = base.training, changed.training
    over = old.over(new.images)
    scale = math.sqrt(new.batch / old.batch) * base.network.width / changed.network.width
    update = {
        "learning_rate": new.learning_rate * scale,
        "warmup_images": over.warmup_images,
        "ema_images": over.ema_images,
    }
    training = new.model_copy(update={k: v for k, v in update.items() if f"training.{k}" not in explicit})
    return changed.model_copy(update={"training": training})
