"""The router to train when nothing else is said."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from ..artifacts import Artifact, UserError
from ..islands.order import Order
from ..models.accounting import flops_forward
from ..models.dit import DiTConfig
from ..models.router import RouterConfig
from ..training.recipe import Training
from ..training.seeds import seed_from
from .train import RouterPlan

DIGITS: tuple[dict[str, Any], Training] = (
    {"width": 64, "depth": 2, "heads": 4, "patch": 4, "activation": "silu", "out_channels": None},
    Training(
        images=76_800,
        batch=128,
        learning_rate=2e-3,
        warmup_images=6_400,
        decay="linear",
        weight_decay=0.01,
        ema_images=6_400,
        seed=0,
    ),
)
MOST_IMAGES = 4_000_000  # 4 % of what eight experts of the larger recipes see
# DDM's and HDDM's router is a DiT-B (the first of these) at patch 2: a fifth of an XL/2, for every step of every image
SIZES = (
    *((768, 12, 12), (512, 10, 8), (384, 12, 6), (384, 6, 6), (256, 8, 4)),
    *((256, 4, 4), (192, 6, 3), (128, 6, 2), (128, 3, 2), (64, 2, 1), (48, 2, 1), (32, 2, 1), (32, 1, 1)),
)  # width, depth, heads
PATCHES = (1, 2, 4, 8, 16)
SHARE = 0.08  # of an expert's operations, that a call of the router may cost
FEWEST_TOKENS = 16  # an image is still seen in four by four places


REFRESHED = 4  # a router that is trained on sees one image in so many; docs/log.md has the figures behind it


def refresh_plan(older: Artifact, *, seed: int) -> RouterPlan:
    """How to go on from an older router's weights: as it was trained, for fewer images, and other ones."""
    plan = RouterPlan.model_validate(older.config["plan"])
    shorter = {name: max(1, getattr(plan.training, name) // REFRESHED) for name in ("images", "ema_images")}
    shorter |= {
        "warmup_images": plan.training.warmup_images // REFRESHED,
        "seed": seed_from(seed, "router", older.digest),
    }
    return plan.model_copy(update={"training": plan.training.model_copy(update=shorter)})


@cache
def router_network(expert: DiTConfig, share: float = SHARE) -> DiTConfig:
    """The trunk of a router beside experts like this one: of those that cost at most `share` of it, the one with the
    largest blocks, and of those the one with the smallest patches. Which cluster an image is of shows in few, large
    patches; to tell clusters apart takes weights.
    """
    shapes = [
        replace(expert, width=width, depth=depth, heads=heads, patch=patch, out_channels=None, qk_norm=False)
        for width, depth, heads in SIZES
        for patch in PATCHES
        if divides(patch, expert) and fits_tokens(patch, expert)
    ]
    most = share * flops_forward(expert)
    affordable = [shape for shape in shapes if flops_forward(shape) <= most]
    if not affordable:  # an expert so small that nothing is
        return min(shapes, key=flops_forward)
    return max(affordable, key=lambda shape: (shape.width**2 * shape.depth, flops_forward(shape)))


def divides(patch: int, expert: DiTConfig) -> bool:
    return not any(side % patch for side in expert.latent[1:])


def fits_tokens(patch: int, expert: DiTConfig) -> bool:
    """Whether patches of this size leave enough tokens; of small latents, as many as there can be."""
    _, height, width = expert.latent
    return (height // patch) * (width // patch) >= min(FEWEST_TOKENS, height * width)


def router_plan(data: Artifact, partition: Artifact, *, blind: bool, seed: int, experts: Sequence[Order]) -> RouterPlan:
    """A router beside these `experts`, as ordered: it sees what they see, or with `blind` the latent and time only."""
    if not experts:
        raise UserError(f"{data.store.parent}: has no orders, which size the router; run `atoll plan` first")
    expert, learns = sorted(
        ((order.architecture, order.training) for order in experts), key=lambda pair: flops_forward(pair[0])
    )[len(experts) // 2]
    if data.config["source"]["kind"] == "digits":
        shape, training = DIGITS
        trunk = replace(expert, **shape)
    else:
        trunk = router_network(expert)
        training = router_training(trunk, learns)
    if blind:
        trunk = blinded(trunk)
    return RouterPlan(
        network=RouterConfig(trunk=trunk, clusters=int(partition.config["clusters"])),
        training=training.model_copy(update={"seed": seed_from(seed, "router")}),
    )


def router_training(trunk: DiTConfig, expert: Training) -> Training:
    """How a router learns beside experts that learn like this: as many images as one of them, at twice its batch.

    At a twelfth of an expert's cost per image it then takes less than a tenth of its time, and less of its memory.
    """
    images = min(expert.images, MOST_IMAGES)
    return Training(
        images=images,
        batch=2 * expert.batch,
        learning_rate=min(2e-3, 1e-4 * 768 / trunk.width),
        warmup_images=images // 50,
        decay=expert.decay,
        weight_decay=0.01,
        ema_images=max(1, images // 40),
        seed=0,
    )


def blinded(trunk: DiTConfig) -> DiTConfig:
    """The same network without a condition."""
    return replace(trunk, condition="none", classes=None, vocabulary=None, text_width=None, text_length=None)
