"""What to train by default: one complete, named configuration per kind of run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from ..artifacts import UserError
from ..islands.order import Acceptance
from ..process import CosineVP, Kind, LinearFlow, LogitNormal, Objective, Uniform
from ..training.recipe import Training

# HDDM's two families: epsilon on a cosine schedule favours detail, velocity on the straight path global structure
OBJECTIVES: Mapping[str, Objective] = {
    "ddpm": Objective(schedule=CosineVP(), kind=Kind.EPSILON, density=Uniform()),
    "flow": Objective(schedule=LinearFlow(), kind=Kind.VELOCITY, density=LogitNormal()),
}


class Network(BaseModel):
    """The backbone's free choices; the data decides the rest (latent shape, vocabulary, classes)."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    width: int = Field(gt=0)
    depth: int = Field(gt=0)
    heads: int = Field(gt=0)
    patch: int = Field(gt=0)
    variant: Literal["adaln", "adaln-single"] = "adaln-single"
    activation: Literal["gelu-tanh", "silu"] = "gelu-tanh"
    qk_norm: bool = False


class PlanConfig(BaseModel):
    """Everything a plan decides. `training.seed` is the run's; every order draws its own from it."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    mix: str | None = Field(default=None, description="such as 2ddpm:6flow; None: one cluster in four gets ddpm")
    network: Network
    training: Training
    objectives: dict[str, Objective] = dict(OBJECTIVES)
    acceptance: Acceptance = Acceptance()


def digits() -> PlanConfig:
    """The demo: 116 thousand weights, fifteen seconds of one core per expert; docs/log.md has the sweep behind it."""
    return PlanConfig(
        network=Network(width=48, depth=3, heads=4, patch=4, activation="silu"),
        training=Training(
            images=96_000,
            batch=64,
            learning_rate=3e-3,
            warmup_images=3_200,
            decay="linear",
            ema_images=3_200,
            seed=0,
        ),
        objectives={**OBJECTIVES, "flow": Objective(schedule=LinearFlow(), kind=Kind.VELOCITY, density=Uniform())},
    )


def small() -> PlanConfig:
    """A first run on real images: DiT-S at patch 2, a day on one consumer GPU."""
    return PlanConfig(
        network=Network(width=384, depth=12, heads=6, patch=2, qk_norm=True),
        training=Training(
            images=12_800_000,
            batch=128,
            learning_rate=2e-4,
            warmup_images=128_000,
            ema_images=900_000,
            seed=0,
        ),
    )


def paper() -> PlanConfig:
    """DDM's and HDDM's expert: XL/2, batch 32, learning rate 1e-4 without warm-up, EMA 0.9999 per step."""
    return PlanConfig(
        network=Network(width=1152, depth=28, heads=16, patch=2),
        training=Training(
            images=12_800_000,
            batch=32,
            learning_rate=1e-4,
            ema_images=222_000,  # 32 images x ln 2 / -ln 0.9999 steps
            seed=0,
        ),
    )


RECIPES = {"digits": digits, "small": small, "paper": paper}


def recipe(name: str) -> PlanConfig:
    if name not in RECIPES:
        raise UserError(f"--recipe {name}: not known; use one of {', '.join(RECIPES)}")
    return RECIPES[name]()


def recipe_for(data: Mapping[str, Any]) -> PlanConfig:
    """The recipe for a data artifact's config when none is named."""
    return recipe("digits" if data["source"]["kind"] == "digits" else "small")
