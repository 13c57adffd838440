"""An expert held to the order it was trained for, field by field, before a byte of its weights is believed.

The order is ours; nothing in a contribution decides how much memory, time or trust it gets.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping

from pydantic import ValidationError

from ..artifacts import DIGEST, Manifest, UserError, canonical_json, differences, explain, sanitize
from ..islands.expert import KIND, ExpertCard
from ..islands.initialization import card_from
from ..islands.order import Order
from ..islands.validation import LIMITS
from ..process import EDM, AnySchedule, DDPMBetas, Kind
from ..training.loop import REPORTS
from .quarantine import Refused

FILES = frozenset({"expert.json", "metrics.jsonl", "model.safetensors"})  # what `atoll train` leaves
METRICS = frozenset({"images", "loss", "val_loss"})
OWN_START = frozenset({"schedule", "kind", "origin", "license", "bridge_limit"})  # that a start of one's own may change
MOST_TEXT = 400  # characters of an origin or a license
MOST_LINES = 64 * REPORTS


def check_manifest(manifest: Manifest, where: str) -> str:
    """The kind of thing, its files and its parents; returns the digest of the order it names."""
    if manifest.kind != KIND:
        raise UserError(f"{where}: is a {sanitize(manifest.kind, 40)} artifact, expected {KIND}; pass another folder")
    if unknown := sorted(set(manifest.files) - FILES):
        raise Refused(f"{where}: lists files no expert has, such as {sanitize(unknown[0], 60)}")
    if missing := sorted(FILES - set(manifest.files)):
        raise Refused(f"{where}: lists no {missing[0]}")
    if not {"order"} <= manifest.parents.keys() <= {"order", "init"}:
        raise Refused(
            f"{where}: its parents are not an order and at most an initial expert; send the folder `atoll train` left"
        )
    for name, digest in manifest.parents.items():
        if not re.fullmatch(DIGEST, digest):
            raise Refused(f"{where}: its parent {name} is no digest")
    return manifest.parents["order"]


def read_card(data: bytes, where: str) -> ExpertCard:
    try:
        return ExpertCard.model_validate_json(data)
    except ValidationError as error:
        raise Refused(f"{where}: its expert.json is not valid ({explain(error)})") from error


def check_card(card: ExpertCard, manifest: Manifest, order: Order, start: ExpertCard | None, where: str) -> None:
    """Every field of the card against what the order makes; `start` is the card of the expert the order trains on."""
    said = card.model_dump(mode="json")
    try:
        same = canonical_json(manifest.config) == canonical_json(said)
    except ValueError as error:  # NaN, or half a character
        raise Refused(f"{where}: its card holds what no JSON file can hold") from error
    if not same:
        raise Refused(f"{where}: its manifest says something else than its card")
    if manifest.license != card.license:
        raise Refused(f"{where}: its manifest names another license than its card")
    given, wanted = manifest.parents.get("init"), None if order.init is None else order.init.digest
    if wanted is not None and given != wanted:
        raise Refused(f"{where}: was not begun from expert {wanted[:12]}, which its order names")
    own_start = wanted is None and given is not None
    expected = card_from(order, start, wanted).model_dump(mode="json")
    free = OWN_START if own_start else {"bridge_limit"}
    for name, value in expected.items():
        if name not in free and said[name] != value:
            change = sanitize("; ".join(differences(value, said[name], name)[:2]), 160)
            raise Refused(f"{where}: its card is not its order's ({change})")
    if said.keys() != expected.keys():
        raise Refused(f"{where}: its card is not its order's")
    check_limit(card, start, own_start, where)
    if own_start:
        check_own_start(card, order, where)


def check_limit(card: ExpertCard, start: ExpertCard | None, own_start: bool, where: str) -> None:
    """A limit that a training measures, or that of what it was begun from."""
    limit, known = card.bridge_limit, {*LIMITS} | (set() if start is None else {start.bridge_limit})
    near = own_start and limit is not None and min(LIMITS) <= limit <= 10 * max(LIMITS)
    if limit not in known and not near:
        raise Refused(f"{where}: its card has a bridge limit of {limit}, which no training gives")


def check_own_start(card: ExpertCard, order: Order, where: str) -> None:
    """What an expert may be that was begun from a start of the contributor's own."""
    objective = order.objective
    if (card.schedule, card.kind) != (objective.schedule, objective.kind):
        if objective.kind is not Kind.VELOCITY:
            raise Refused(f"{where}: predicts {card.kind} on {card.schedule.name}, its order wants {objective.kind}")
        check_schedule(card.schedule, where)
    texts = {"origin": card.origin, "license": card.license}
    for name, text in texts.items():
        if text is not None and (len(text) > MOST_TEXT or not text.isprintable()):
            raise Refused(f"{where}: its {name} is longer than {MOST_TEXT} characters, or cannot be printed")
    if not card.origin:
        raise Refused(f"{where}: was begun from a start, and does not say which")
    if order.license and order.license not in (card.license or "").split(" AND "):
        raise Refused(f"{where}: its license leaves out that of the data ({sanitize(order.license, 60)})")


def check_schedule(schedule: AnySchedule, where: str) -> None:
    """A schedule that exists: no table of a billion steps, no exponent that nothing survives."""
    sane = True
    if isinstance(schedule, DDPMBetas):
        sane = 10 <= schedule.steps <= 10_000
    elif isinstance(schedule, EDM):
        sane = schedule.sigma_min >= 1e-4 and schedule.sigma_max <= 1e4 and 1 <= schedule.rho <= 20
    if not sane:
        raise Refused(f"{where}: its schedule {schedule.name} has values that no network is trained with")


def check_metrics(data: bytes, order: Order, where: str) -> None:
    """Rows of {images, loss, val_loss}, rising to the order's budget, all finite: `evaluate` draws them."""
    lines = data.splitlines()
    if len(lines) > MOST_LINES:
        raise Refused(f"{where}: its metrics.jsonl has more than {MOST_LINES:,} lines")
    if not lines:
        raise Refused(f"{where}: has no metrics at all")
    before = 0
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line, parse_constant=lambda name: math.nan)
        except (ValueError, RecursionError):
            row = None
        if not isinstance(row, Mapping) or not {"images", "loss"} <= row.keys() <= METRICS:
            raise Refused(f"{where}: line {number} of its metrics.jsonl is no row of metrics")
        images, values = row["images"], [row[name] for name in METRICS - {"images"} if name in row]
        if type(images) is not int or not before < images <= order.training.images:
            raise Refused(f"{where}: line {number} of its metrics.jsonl counts images as no training does")
        if not all(is_finite(value) for value in values):
            raise Refused(f"{where}: line {number} of its metrics.jsonl holds a value that is no finite number")
        before = images


def is_finite(value: object) -> bool:
    if type(value) not in (int, float):
        return False
    try:
        return math.isfinite(value)  # type: ignore[arg-type]
    except OverflowError:
        return False
