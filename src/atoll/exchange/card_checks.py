"""Manifest, card and metrics of an expert, compared with its order.

The order is the organizer's. Nothing in a contribution decides how much memory or time it gets.
"""

from __future__ import annotations

import re

import torch
from pydantic import BaseModel, ConfigDict, ValidationError

from ..artifacts import DIGEST, Manifest, UserError, canonical_json, differences, explain, sanitize
from ..diffusion import VE, AnySchedule, DDPMBetas, Kind
from ..islands.expert import KIND, ExpertCard
from ..islands.initialization import card_for
from ..islands.order import Order
from ..islands.validation import LIMITS
from ..models.dit import DiT, DiTConfig
from .quarantine import Refused
from .thresholds import AdmissionThresholds

CARD, METRICS, WEIGHTS = "expert.json", "metrics.jsonl", "model.safetensors"
FILES = frozenset({CARD, METRICS, WEIGHTS})  # what `atoll train` leaves
OWN_INIT = frozenset({"schedule", "kind", "origin", "license", "bridge_limit"})  # free where the order names no init


class MetricsRow(BaseModel):
    """A line of metrics.jsonl."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    images: int
    loss: float
    val_loss: float | None = None


def check_manifest(manifest: Manifest, where: str) -> str:
    """Check kind, files and parents; returns the digest of the order it names."""
    if manifest.kind != KIND:
        raise UserError(f"{where}: is a {sanitize(manifest.kind, 40)} artifact, expected {KIND}; pass another folder")
    if unknown := sorted(set(manifest.files) - FILES):
        raise Refused(f"lists files no expert has, such as {sanitize(unknown[0], 60)}")
    if missing := sorted(FILES - set(manifest.files)):
        raise Refused(f"lists no {missing[0]}")
    if not {"order"} <= manifest.parents.keys() <= {"order", "init"}:
        raise Refused("its parents are not an order and at most an initial expert; send the folder `atoll train` left")
    for name, digest in manifest.parents.items():
        if not re.fullmatch(DIGEST, digest):
            raise Refused(f"its parent {name} is no digest")
    return manifest.parents["order"]


def largest_files(architecture: DiTConfig, limits: AdmissionThresholds) -> dict[str, int]:
    """The most bytes of each file of an expert of this architecture."""
    with torch.device("meta"):
        weights = sum(4 * value.numel() for value in DiT(architecture).state_dict().values())
    return {CARD: limits.card_bytes, METRICS: limits.metrics_bytes, WEIGHTS: weights + limits.header_bytes}


def read_card(data: bytes) -> ExpertCard:
    try:
        return ExpertCard.model_validate_json(data)
    except ValidationError as error:
        raise Refused(f"its {CARD} is not valid ({explain(error)})") from error


def check_card(
    card: ExpertCard, manifest: Manifest, order: Order, init: ExpertCard | None, limits: AdmissionThresholds
) -> None:
    """Every field of the card as the order makes it; `init` is the card of the expert the order begins from."""
    found = card.model_dump(mode="json")
    try:
        same = canonical_json(manifest.config) == canonical_json(found)
    except ValueError as error:  # NaN, or half a character
        raise Refused("its card holds what no JSON file can hold") from error
    if not same:
        raise Refused("its manifest has another card than its expert.json")
    if manifest.license != card.license:
        raise Refused("its manifest names another license than its card")
    given, wanted = manifest.parents.get("init"), None if order.init is None else order.init.digest
    if wanted is not None and given != wanted:
        raise Refused(f"was not begun from expert {wanted[:12]}, which its order names")
    own_init = wanted is None and given is not None
    free = OWN_INIT if own_init else {"bridge_limit"}
    expected = card_for(order, init, wanted).model_dump(mode="json")
    for name in expected | found:
        if name not in free and (name not in expected or found.get(name) != expected[name]):
            change = sanitize("; ".join(differences(expected.get(name), found.get(name), name)[:2]), 160)
            raise Refused(f"its card is not its order's ({change})")
    if card.bridge_limit not in {*LIMITS} | (set() if init is None else {init.bridge_limit}):
        raise Refused(f"its card has a bridge limit of {card.bridge_limit}, which no training gives")
    if own_init:
        check_own_init(card, order, limits)


def check_own_init(card: ExpertCard, order: Order, limits: AdmissionThresholds) -> None:
    """Limits of an expert that began from one of the contributor's own, maybe through the bridge."""
    wanted = order.objective
    if (card.schedule, card.kind) != (wanted.schedule, wanted.kind):
        if wanted.kind is not Kind.VELOCITY:
            raise Refused(f"predicts {card.kind} on {card.schedule.name}, its order wants {wanted.kind}")
        if not is_usable(card.schedule):
            raise Refused(f"its schedule {card.schedule.name} has values that no network is trained with")
    for text in (card.origin or "", card.license or ""):
        if len(text) > limits.text_length or not text.isprintable():
            raise Refused(f"its origin or license is longer than {limits.text_length} characters, or cannot be printed")
    if not card.origin:
        raise Refused("was begun from another expert, and its card does not name it")
    if order.license and order.license not in (card.license or "").split(" AND "):
        raise Refused(f"its license leaves out that of the data ({sanitize(order.license, 60)})")


def is_usable(schedule: AnySchedule) -> bool:
    """No table of a billion steps, no exponent that overflows."""
    if isinstance(schedule, DDPMBetas):
        return 10 <= schedule.steps <= 10_000
    if isinstance(schedule, VE):
        return schedule.sigma_min >= 1e-4 and schedule.sigma_max <= 1e4 and 1 <= schedule.rho <= 20
    return True


def check_metrics(data: bytes, order: Order, limits: AdmissionThresholds) -> None:
    """Rows of images, loss and maybe val_loss: images rise to the order's budget, all values are finite."""
    lines = data.splitlines()
    if not 0 < len(lines) <= limits.metrics_lines:
        raise Refused(f"its {METRICS} has {len(lines):,} lines, 1 to {limits.metrics_lines:,} are allowed")
    before = 0
    for number, line in enumerate(lines, 1):
        try:
            images = MetricsRow.model_validate_json(line).images
        except ValidationError as error:
            raise Refused(f"line {number} of its {METRICS} is no row of finite metrics") from error
        if not before < images <= order.training.images:
            raise Refused(f"line {number} of its {METRICS} counts images as no training does")
        before = images
