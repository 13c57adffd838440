"""The router to train when nothing else is said."""

from __future__ import annotations

from ..artifacts import Artifact
from ..models.router import RouterConfig
from ..planning.recipes import Network
from ..planning.stage import architecture
from ..training.recipe import Training
from ..training.seeds import seed_from
from .train import RouterPlan

DIGITS = (
    Network(width=64, depth=2, heads=4, patch=4, activation="silu"),
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
# DDM's and HDDM's router is a DiT-B/2; this trains it for about 4 % of eight experts' images
IMAGES = (
    Network(width=768, depth=12, heads=12, patch=2),
    Training(
        images=4_000_000,
        batch=256,
        learning_rate=1e-4,
        warmup_images=64_000,
        ema_images=90_000,
        seed=0,
    ),
)


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


def router_plan(data: Artifact, partition: Artifact, *, blind: bool, seed: int) -> RouterPlan:
    """A router for this data: it sees what the experts see, or with `blind` the latent and the time only."""
    network, training = DIGITS if data.config["source"]["kind"] == "digits" else IMAGES
    config = data.config | ({"text": None, "labels": None} if blind else {})
    return RouterPlan(
        network=RouterConfig(trunk=architecture(config, network), clusters=int(partition.config["clusters"])),
        training=training.model_copy(update={"seed": seed_from(seed, "router")}),
    )
