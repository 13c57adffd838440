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
    if names is None or count is None:
        return None
    return tuple(map(str, names))


def class_title(number: int, names: Sequence[str] | None) -> str:
    """What a report calls a class: its name, or where it has none, its number."""
    return str(number) if names is None or number >= len(names) else names[number]


def class_number(prompt: str | int, count: int, names: Sequence[str] | None = None) -> int:
    """The class of `count` that a prompt asks for: a number, or where they have names, a name or its telling words.

    A whole name comes first, so that a class called "7" is asked for by its name; case, `_` and `-` do not matter.
    Otherwise every word of the prompt must be in the name of one class, and of no other.
    """
    if isinstance(prompt, int):
        return _checked(prompt, count, names)
    if names is not None and prompt in names[:count]:
        return names.index(prompt)
    known = [sanitize(name, 60) for name in (names or ())[:count]]
    fitting = _fitting(prompt, known)
    if len(fitting) == 1:
        return fitting[0]
    if len(fitting) > 1:
        which = ", ".join(f"{known[number]} ({number})" for number in fitting[:SHOWN])
        more = f" and {len(fitting) - SHOWN} more" if len(fitting) > SHOWN else ""
        raise UserError(
            f"--prompt {prompt!r}: fits {len(fitting)} classes, {which}{more}; write one whole, or its number"
        )
    if prompt.strip().isdecimal():
        return _checked(int(prompt), count, names)
    if not known:
        raise UserError(
            f"--prompt {prompt!r}: this model reads a class number from 0 to {count - 1}; its classes have no names"
        )
    raise UserError(f"--prompt {prompt!r}: no class of this model; {suggest(prompt, known)}")


def _fitting(prompt: str, names: Sequence[str]) -> list[int]:
    """Classes whose name is the prompt; else is it but for filling words; else has all of its telling words."""
    wanted, words = _words(prompt), [_words(name) for name in names]
    telling = wanted - FILLING
    whole = [number for number, name in enumerate(words) if name == wanted]
    if whole or not telling:
        return whole
    same = [number for number, name in enumerate(words) if name - FILLING == telling]
    return same or [number for number, name in enumerate(words) if telling <= name]


def _checked(number: int, count: int, names: Sequence[str] | None) -> int:
    if not 0 <= number < count:
        named = "" if names is None else f", {sanitize(names[0], 60)} to {sanitize(names[count - 1], 60)}"
        raise UserError(f"--prompt {number}: this model knows the classes 0 to {count - 1}{named}")
    return number


def _words(text: str) -> frozenset[str]:
    return frozenset(re.findall(r"[^\W_]+", text.lower()))
