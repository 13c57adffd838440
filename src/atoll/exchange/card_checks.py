"""Manifest, card and metrics of an expert, compared with its order.

The order is the organizer's. Nothing in a contribution decides how much memory or time it gets.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping

from pydantic import ValidationError

from ..artifacts import DIGEST, Manifest, UserError, canonical_json, differences, explain, sanitize
from ..diffusion import EDM, AnySchedule, DDPMBetas, Kind
from ..islands.expert import KIND, ExpertCard
from ..islands.initialization import card_for
from ..islands.order import Order
from ..islands.validation import LIMITS
from ..models.dit import DiT, DiTConfig
from ..models.shapes import as_shapes
from .quarantine import Refused
from .thresholds import AdmissionThresholds

CARD, METRICS, WEIGHTS = "expert.json", "metrics.jsonl", "model.safetensors"
FILES = frozenset({CARD, METRICS, WEIGHTS})  # what `atoll train` leaves
VALUES = frozenset({"loss", "val_loss"})
OWN_INIT = frozenset({"schedule", "kind", "origin", "license", "bridge_limit"})  # free where the order names no init


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
    with as_shapes():
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
    expected = card_for(order, init, wanted).model_dump(mode="json")
    changed = [name for name in expected | found if name not in expected or found.get(name) != expected[name]]
    for name in changed:
        if name not in (OWN_INIT if own_init else {"bridge_limit"}):
            change = sanitize("; ".join(differences(expected.get(name), found.get(name), name)[:2]), 160)
            raise Refused(f"its card is not its order's ({change})")
    trained = {*LIMITS} | (set() if init is None else {init.bridge_limit})  # limits that a training gives
    near = own_init and card.bridge_limit is not None and min(LIMITS) <= card.bridge_limit <= 10 * max(LIMITS)
    if card.bridge_limit not in trained and not near:
        raise Refused(f"its card has a bridge limit of {card.bridge_limit}, which no training gives")
    if own_init:
        check_own_init(card, order, limits)


def check_own_init(card: ExpertCard, order: Order, limits: AdmissionThresholds) -> None:
    """Limits of an expert that began from an expert of the contributor's own."""
    objective = order.objective
    if (card.schedule, card.kind) != (objective.schedule, objective.kind):
        if objective.kind is not Kind.VELOCITY:
            raise Refused(f"predicts {card.kind} on {card.schedule.name}, its order wants {objective.kind}")
        if not is_usable(card.schedule):
            raise Refused(f"its schedule {card.schedule.name} has values that no network is trained with")
    for name, text in (("origin", card.origin), ("license", card.license)):
        if text is not None and (len(text) > limits.text_length or not text.isprintable()):
            raise Refused(f"its {name} is longer than {limits.text_length} characters, or cannot be printed")
    if not card.origin:
        raise Refused("was begun from another expert, and its card does not name it")
    if order.license and order.license not in (card.license or "").split(" AND "):
        raise Refused(f"its license leaves out that of the data ({sanitize(order.license, 60)})")


def is_usable(schedule: AnySchedule) -> bool:
    """No table of a billion steps, no exponent that overflows."""
    if isinstance(schedule, DDPMBetas):
        return 10 <= schedule.steps <= 10_000
    if isinstance(schedule, EDM):
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
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        if not isinstance(row, Mapping) or not {"images", "loss"} <= row.keys() <= {"images", *VALUES}:
            raise Refused(f"line {number} of its {METRICS} is no row of metrics")
        images = row["images"]
        if type(images) is not int or not before < images <= order.training.images:
            raise Refused(f"line {number} of its {METRICS} counts images as no training does")
        if not all(is_finite(row[name]) for name in VALUES & row.keys()):
            raise Refused(f"line {number} of its {METRICS} holds a value that is no finite number")
        before = images


def is_finite(value: object) -> bool:
    try:
        return type(value) in (int, float) and math.isfinite(value)  # type: ignore[arg-type]
    except OverflowError:
        return False
