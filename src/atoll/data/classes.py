"""Classes by name: what people type to a network that reads class numbers."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ..artifacts import Artifact, UserError, sanitize, suggest

FILLING = frozenset(["a", "an", "the", "of", "photo", "picture", "image"])  # "a photo of a cat" asks for a cat
SHOWN = 10  # classes listed where several fit


def class_names(data: Artifact) -> tuple[str, ...] | None:
    """The names of a data artifact's labels, by number; None where it has no labels or they have no names."""
    names, count = data.config["source"]["classes"], data.config["labels"]
    return None if names is None or count is None else tuple(map(str, names))


def class_title(number: int, names: Sequence[str] | None) -> str:
    """What a report calls a class: its name, or where it has none, its number."""
    return str(number) if names is None or number >= len(names) else names[number]


def class_number(prompt: str | int, count: int, names: Sequence[str] | None = None) -> int:
    """The class of `count` that a prompt asks for: a number, or where they have names, a name or its telling words.

    A whole name comes first, so that a class called "7" is asked for by its name; case, `_` and `-` do not matter.
    Otherwise every word of the prompt must be in the name of one class, and of no other.
    """
    known = [sanitize(name, 60) for name in (names or ())[:count]]
    fitting = [] if isinstance(prompt, int) else _fitting(prompt, (names or ())[:count])
    if len(fitting) == 1:
        return fitting[0]
    if len(fitting) > 1:
        which = ", ".join(f"{known[number]} ({number})" for number in fitting[:SHOWN])
        more = f" and {len(fitting) - SHOWN} more" if len(fitting) > SHOWN else ""
        raise UserError(
            f"--prompt {prompt!r}: fits {len(fitting)} classes, {which}{more}; write one whole, or its number"
        )
    if isinstance(prompt, int) or prompt.strip().isdecimal():
        if 0 <= int(prompt) < count:
            return int(prompt)
        named = f", {known[0]} to {known[-1]}" if known else ""
        raise UserError(f"--prompt {prompt}: this model knows the classes 0 to {count - 1}{named}")
    if known:
        raise UserError(f"--prompt {prompt!r}: no class of this model; {suggest(prompt, known)}")
    raise UserError(
        f"--prompt {prompt!r}: this model reads a class number from 0 to {count - 1}; its classes have no names"
    )


def _fitting(prompt: str, names: Sequence[str]) -> list[int]:
    """Classes whose name is the prompt, letter by letter or word by word; else those with all of its telling words."""
    wanted, words = _words(prompt), [_words(name) for name in names]
    telling = wanted - FILLING
    for fits in (
        [name == prompt for name in names],
        [name == wanted for name in words],
        [bool(telling) and name - FILLING == telling for name in words],
        [bool(telling) and telling <= name for name in words],
    ):
        if any(fits):
            return [number for number, fit in enumerate(fits) if fit]
    return []


def _words(text: str) -> frozenset[str]:
    return frozenset(re.findall(r"[^\W_]+", text.lower()))
