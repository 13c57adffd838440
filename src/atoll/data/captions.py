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


@dataclass(frozen=True)
class Said:
    """What a source says about an image, and what it said that could not be understood."""

    captions: tuple[str, ...] = ()
    label: int | None = None
    troubles: tuple[str, ...] = ()

    def __add__(self, other: Said) -> Said:
        labels, troubles = {self.label, other.label} - {None}, self.troubles + other.troubles
        if len(labels) > 1:
            troubles += (TWO_LABELS,)
        # a third label does not settle what two disagree on: else the order would decide
        label = labels.pop() if len(labels) == 1 and TWO_LABELS not in troubles else None
        return Said(tuple(dict.fromkeys(self.captions + other.captions)), label, troubles)


def from_text(data: bytes) -> Said:
    """A .txt file: one caption per line."""
    try:
        lines = data.decode("utf-8-sig").splitlines()
    except UnicodeDecodeError:
        return Said(troubles=("bad caption: not UTF-8",))
    return from_captions(lines)


def from_json(data: bytes) -> Said:
    """A .json file: an object with caption (or captions, text, prompt) and label."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return Said(troubles=("bad caption: not JSON",))
    if not isinstance(value, dict):
        return Said(troubles=("bad caption: not a JSON object",))
    return from_fields(value)


def from_fields(fields: Mapping[str, Any]) -> Said:
    """Captions and label among the fields of a record; other fields are none of our business."""
    said = Said()
    for name in CAPTION_NAMES:
        said += from_captions(fields.get(name))
    for name in LABEL_NAMES:
        said += from_label(fields.get(name))
    return said


def from_captions(value: Any) -> Said:
    """None, one caption or a list of them."""
    captions: list[str] = []
    troubles: list[str] = []
    for text in value if isinstance(value, list) else [value]:
        if text is None:
            continue
        if not isinstance(text, str):
            troubles.append("bad caption: not text")
            continue
        clean = " ".join(text.split())
        if len(clean) > LONGEST:
            troubles.append(f"bad caption: longer than {LONGEST} characters")
        elif not encodable(clean) or "\0" in clean:
            troubles.append("bad caption: not UTF-8")
        elif clean:
            captions.append(clean)
    return Said(tuple(captions), None, tuple(troubles))


def from_label(value: Any) -> Said:
    """None or a whole number from 0."""
    if value is None:
        return Said()
    if isinstance(value, bytes):
        text = value.decode("ascii", errors="replace").strip()
        value = int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else text
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**31:
        return Said(troubles=("bad label: not a whole number from 0",))
    return Said(label=value)


def encodable(text: str) -> bool:
    """Whether the text is Unicode; JSON can smuggle in half a character."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
