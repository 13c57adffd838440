"""What became of every tensor: the key-by-key report of a conversion."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Literal

How = Literal["kept", "derived", "fitted", "re-initialised", "dropped"]
MEANING: dict[How, str] = {
    "kept": "the same numbers",
    "derived": "computed from the old ones, exact",
    "fitted": "the closest the new network can come to the old one, with the residual",
    "re-initialised": "fresh, as in a new network",
    "dropped": "no place in the new network",
}


@dataclass(frozen=True)
class Entry:
    """The fate of one tensor: `key` is ours, `source` theirs; one of them may be missing."""

    key: str | None
    source: tuple[str, ...]
    how: How
    note: str = ""
    residual: float | None = None  # relative root mean square, 0 is exact


@dataclass
class Report:
    entries: list[Entry] = field(default_factory=list)

    def add(
        self, key: str | None, source: tuple[str, ...], how: How, note: str = "", residual: float | None = None
    ) -> None:
        """Add a line; a tensor that is changed twice keeps one line with both notes."""
        for index, entry in enumerate(self.entries):
            if key is not None and entry.key == key:
                note = "; ".join(filter(None, (entry.note, note)))
                self.entries[index] = Entry(key, entry.source, how, note, residual)
                return
        self.entries.append(Entry(key, source, how, note, residual))

    def count(self) -> dict[How, int]:
        return dict(Counter(entry.how for entry in self.entries))

    def as_json(self) -> list[dict[str, object]]:
        return [asdict(entry) for entry in self.entries]

    def rows(self) -> list[tuple[str, str, str, str]]:
        """Lines to print: (key, source, how, note), the same fate in every block on one line."""
        groups: dict[tuple[str, str, str, str], list[Entry]] = {}
        for entry in self.entries:
            sources = " + ".join(dict.fromkeys(_any_block(name) for name in entry.source))
            groups.setdefault((_any_block(entry.key or "-"), sources, entry.how, entry.note), []).append(entry)
        lines = []
        for (key, source, how, note), entries in groups.items():
            residuals = [entry.residual for entry in entries if entry.residual is not None]
            if residuals:
                note = f"{note}, residual {max(residuals):.3g}".removeprefix(", ")
            times = f" x{len(entries)}" if len(entries) > 1 else ""
            lines.append((key + times, source or "-", how, note))
        return lines


def _any_block(name: str) -> str:
    return re.sub(r"blocks\.\d+\.", "blocks.*.", name)
