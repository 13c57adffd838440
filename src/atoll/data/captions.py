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
        return from_fields({"caption": data.decode("utf-8-sig").splitlines()})
    except UnicodeDecodeError:
        return Annotation(warnings=("bad caption: not UTF-8",))


def from_json(data: bytes) -> Annotation:
    """A .json file: an object with caption (or captions, text, prompt) and label."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return Annotation(warnings=("bad caption: not JSON",))
    return from_fields(value) if isinstance(value, dict) else Annotation(warnings=("bad caption: not a JSON object",))


def from_label(data: bytes) -> Annotation:
    """A .cls file: a number."""
    text = data.decode("ascii", errors="replace").strip()
    return from_fields({"label": int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else text})


def from_fields(fields: Mapping[str, Any]) -> Annotation:
    """Captions (each one text or a list) and label among the fields of a record; other fields are ignored."""
    note = Annotation()
    for value in (fields.get(name) for name in CAPTION_NAMES):
        for text in value if isinstance(value, list) else [value]:
            if text is not None:
                note += from_caption(text)
    for value in (fields.get(name) for name in LABEL_NAMES):
        if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31:
            note += Annotation(label=value)
        elif value is not None:
            note += Annotation(warnings=("bad label: not a whole number from 0",))
    return note


def from_caption(text: Any) -> Annotation:
    if not isinstance(text, str):
        return Annotation(warnings=("bad caption: not text",))
    clean = " ".join(text.split())
    if len(clean) > LONGEST:
        return Annotation(warnings=(f"bad caption: longer than {LONGEST} characters",))
    if not encodable(clean) or "\0" in clean:
        return Annotation(warnings=("bad caption: not UTF-8",))
    return Annotation((clean,) if clean else ())


def encodable(text: str) -> bool:
    """Whether the text is Unicode; JSON can smuggle in half a character."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
