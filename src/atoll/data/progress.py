"""How a stage reports how far it is."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Called with what is being done, how much of it is done and how much there is (None: not known)."""

    def __call__(self, what: str, done: int, total: int | None, /) -> None: ...


def silent(what: str, done: int, total: int | None) -> None:
    """Show nothing."""
