"""Captions and labels as people write them, checked before anything is made of them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

CAPTION_NAMES = ("caption", "captions", "text", "prompt")
LABEL_NAMES = ("label", "cls")
LONGEST = 10_000  # characters; longer is a mistake, such as a whole page
TWO_LABELS = "bad label: two labels for one image"


@dataclass(frozen=True, slots=True)
class Annotation:
    """Captions and label of an image, and what was wrong with others that a source has for it."""

    captions: tuple[str, ...] = ()
    label: int | None = None
    warnings: tuple[str, ...] = ()

    def __add__(self, other: Annotation) -> Annotation:
        labels, warnings = {self.label, other.label} - {None}, self.warnings + other.warnings
        if len(labels) > 1:
            warnings += (TWO_LABELS,)
        # a third label does not settle what two disagree on: else the order would decide
        label = labels.pop() if len(labels) == 1 and TWO_LABELS not in warnings else None
        return Annotation(tuple(dict.fromkeys(self.captions + other.captions)), label, warnings)


def from_text(data: bytes) -> Annotation:
    """A .txt file: one caption per line."""
    try:
        lines = data.decode("utf-8-sig").splitlines()
    except UnicodeDecodeError:
        return Annotation(warnings=("bad caption: not UTF-8",))
    return from_captions(lines)


def from_json(data: bytes) -> Annotation:
    """A .json file: an object with caption (or captions, text, prompt) and label."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return Annotation(warnings=("bad caption: not JSON",))
    if not isinstance(value, dict):
        return Annotation(warnings=("bad caption: not a JSON object",))
    return from_fields(value)


def from_fields(fields: Mapping[str, Any]) -> Annotation:
    """Captions and label among the fields of a record; other fields are ignored."""
    note = Annotation()
    for name in CAPTION_NAMES:
        note += from_captions(fields.get(name))
    for name in LABEL_NAMES:
        note += from_label(fields.get(name))
    return note


def from_captions(value: Any) -> Annotation:
    """None, one caption or a list of them."""
    captions: list[str] = []
    warnings: list[str] = []
    for text in value if isinstance(value, list) else [value]:
        if text is None:
            continue
        if not isinstance(text, str):
            warnings.append("bad caption: not text")
            continue
        clean = " ".join(text.split())
        if len(clean) > LONGEST:
            warnings.append(f"bad caption: longer than {LONGEST} characters")
        elif not encodable(clean) or "\0" in clean:
            warnings.append("bad caption: not UTF-8")
        elif clean:
            captions.append(clean)
    return Annotation(tuple(captions), None, tuple(warnings))


def from_label(value: Any) -> Annotation:
    """None or a whole number from 0."""
    if value is None:
        return Annotation()
    if isinstance(value, bytes):
        text = value.decode("ascii", errors="replace").strip()
        value = int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else text
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**31:
        return Annotation(warnings=("bad label: not a whole number from 0",))
    return Annotation(label=value)


def encodable(text: str) -> bool:
    """Whether the text is Unicode; JSON can smuggle in half a character."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
