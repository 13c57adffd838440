"""The settings of the demo: `atoll run` on handwritten digits."""

from __future__ import annotations

from .data.config import PrepareConfig
from .partition.methods import PartitionConfig
from .pipeline.settings import Asked, EvalConfig, RunSettings
from .planning.recipes import PlanConfig, recipe

DEVICE = "cpu"  # bit-exact everywhere, and fast enough for 8x8 images
OBJECTIVES = "2ddpm:6flow"


def demo_settings(seed: int) -> RunSettings:
    return settings_for(recipe("digits"), seed, router_images=76_800, samples=1000, steps=50)


def tiny_settings(seed: int) -> RunSettings:
    """What tests can kill and resume in seconds."""
    orders = recipe("digits")
    # 20 steps: at the demo's learning rate further training may make an expert worse
    small = {"images": 640, "batch": 32, "learning_rate": 3e-3, "warmup_images": 64, "ema_images": 64}
    training = orders.training.model_copy(update=small)
    # such an expert would not pass the usual threshold
    acceptance = orders.acceptance.model_copy(update={"max_ratio_to_gaussian": 1000.0})
    orders = orders.model_copy(update={"training": training, "acceptance": acceptance})
    return settings_for(orders, seed, router_images=1280, samples=40, steps=4)


def settings_for(orders: PlanConfig, seed: int, *, router_images: int, samples: int, steps: int) -> RunSettings:
    training = orders.training.model_copy(update={"seed": seed})
    evaluation = EvalConfig(steps=steps, count=samples)
    compared = {"routes": ("top-1", "top-2", "threshold-0.2", "full"), "guidances": (2.0, 1.0), "blind": True}
    return RunSettings(
        source="digits",
        asked=Asked(clusters=8, objectives=OBJECTIVES, seed=seed),
        prepare=PrepareConfig(),
        partition=PartitionConfig(clusters=8, seed=seed),
        plan=orders.model_copy(update={"objectives": OBJECTIVES, "training": training}),
        router_images=router_images,
        evaluation=evaluation,
        comparison=evaluation.model_copy(update=compared),
    )
