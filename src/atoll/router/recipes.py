"""The router to train by default: sized by the experts of a run, and trained on as many images as one of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..artifacts import Artifact, UserError
from ..islands.order import Order
from ..models.accounting import flops_forward
from ..models.dit import DiTConfig
from ..models.router import RouterConfig
from ..training.config import TrainConfig
from ..training.seeds import seed_from
from .train import RouterPlan

# width, depth, heads, from the largest; DDM's and HDDM's router is the first, a DiT-B, at patch 2
SIZES = (
    *((768, 12, 12), (512, 10, 8), (384, 12, 6), (384, 6, 6), (256, 8, 4)),
    *((256, 4, 4), (192, 6, 3), (128, 6, 2), (128, 3, 2), (64, 2, 1), (48, 2, 1), (32, 2, 1), (32, 1, 1)),
)
PATCHES = (1, 2, 4, 8, 16)
FEWEST_TOKENS = 16  # an image is still seen in four by four places
COST = 0.08  # of an expert's FLOPs, that a call of the router may take
MOST_IMAGES = 4_000_000
REFRESHED = 4  # a router that is trained further sees one image in so many
DIGITS = {"width": 64, "depth": 2, "heads": 4, "patch": 4, "activation": "silu"}
DIGITS_TRAINING = {"images": 76_800, "batch": 128, "learning_rate": 2e-3, "warmup_images": 6_400, "ema_images": 6_400}


def router_network(expert: DiTConfig) -> DiTConfig:
    """The trunk of a router beside experts like this one: the largest blocks it can afford, then the smallest patches.

    Which cluster an image is of shows in few, large patches; to tell clusters apart takes weights.
    """
    _, height, width = expert.latent
    fewest, most = min(FEWEST_TOKENS, height * width), COST * flops_forward(expert)
    patches = [p for p in PATCHES if height % p == width % p == 0 and (height // p) * (width // p) >= fewest]
    for size, depth, heads in SIZES:
        shape = replace(expert, width=size, depth=depth, heads=heads, out_channels=None, qk_norm=False)
        shapes = [replace(shape, patch=patch) for patch in patches]
        if flops_forward(shapes[-1]) <= most:
            return next(shape for shape in shapes if flops_forward(shape) <= most)
    return shapes[-1]  # beside an expert so small that nothing is affordable, the smallest


def router_training(trunk: DiTConfig, expert: TrainConfig) -> TrainConfig:
    """As many images as an expert sees, at twice its batch: less than a tenth of its time, and less of its memory."""
    images = min(expert.images, MOST_IMAGES)
    return TrainConfig(
        images=images,
        batch=2 * expert.batch,
        learning_rate=min(2e-3, 1e-4 * 768 / trunk.width),
        warmup_images=images // 50,
        decay=expert.decay,
        weight_decay=0.01,
        ema_images=max(1, images // 40),
        seed=0,
    )


def router_plan(data: Artifact, partition: Artifact, *, blind: bool, seed: int, experts: Sequence[Order]) -> RouterPlan:
    """A router beside these `experts`, as ordered: it sees what they see, or with `blind` the latent and time only."""
    if not experts:
        raise UserError(f"{data.store.parent}: has no orders, which size the router; run `atoll plan` first")
    middle = sorted(experts, key=lambda order: flops_forward(order.architecture))[len(experts) // 2]
    if data.config["source"]["kind"] == "digits":
        trunk = replace(middle.architecture, **DIGITS, out_channels=None)  # type: ignore[arg-type]
        training = TrainConfig(**DIGITS_TRAINING, decay="linear", weight_decay=0.01, seed=0)
    else:
        trunk = router_network(middle.architecture)
        training = router_training(trunk, middle.training)
    return RouterPlan(
        network=RouterConfig(trunk=blinded(trunk) if blind else trunk, clusters=int(partition.config["clusters"])),
        training=training.model_copy(update={"seed": seed_from(seed, "router")}),
    )


def refresh_plan(older: Artifact, *, seed: int) -> RouterPlan:
    """How to train an older router further: as it was trained, for fewer images, and other ones."""
    plan = RouterPlan.model_validate(older.config["plan"])
    shorter = {name: max(1, getattr(plan.training, name) // REFRESHED) for name in ("images", "ema_images")}
    shorter |= {
        "warmup_images": plan.training.warmup_images // REFRESHED,
        "seed": seed_from(seed, "router", older.digest),
    }
    return plan.model_copy(update={"training": plan.training.model_copy(update=shorter)})


def blinded(trunk: DiTConfig) -> DiTConfig:
    """The same network without a condition."""
    return replace(trunk, condition="none", classes=None, vocabulary=None, text_width=None, text_length=None)
