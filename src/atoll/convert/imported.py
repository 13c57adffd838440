"""An imported network, and what became of each of its tensors on the way."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from torch import Tensor

from ..artifacts import sanitize
from ..diffusion import AnySchedule, Kind
from ..models.dit import DiTConfig

# kept: the same numbers; derived: computed exactly; fitted: as close as the new network can come
How = Literal["kept", "derived", "fitted", "re-initialized", "dropped"]


@dataclass(frozen=True)
class Fate:
    """Where a tensor comes from: `source` are the names in the foreign file."""

    how: How
    source: tuple[str, ...] = ()
    note: str = ""
    residual: float | None = None  # relative root mean square; 0 is exact


@dataclass(frozen=True)
class ImportedNetwork:
    """A trained network under our names. `fates` are by our name; `dropped` says why by foreign name."""

    config: DiTConfig
    weights: Mapping[str, Tensor]
    schedule: AnySchedule
    kind: Kind
    fates: Mapping[str, Fate] = field(default_factory=dict)
    dropped: Mapping[str, str] = field(default_factory=dict)

    def fate(self, key: str) -> Fate:
        """What became of one of our tensors; without a record it is the source's own."""
        return self.fates.get(key, Fate("kept", (key,)))

    def derive(self, weights: Mapping[str, Tensor], note: str) -> ImportedNetwork:
        """The network with these weights, which were computed exactly from its own."""
        old = {key: self.fate(key) for key in weights}
        notes = {key: "; ".join(filter(None, (fate.note, note))) for key, fate in old.items()}
        fates = {key: replace(fate, how="derived", note=notes[key]) for key, fate in old.items()}
        return replace(self, weights={**self.weights, **weights}, fates={**self.fates, **fates})

    def report(self) -> list[dict[str, Any]]:
        """One row per tensor, as conversion.json keeps them; `key` is our name, None for what was dropped."""
        return [{"key": key, **asdict(fate)} for key, fate in self._fates()]

    def count(self) -> dict[How, int]:
        """How many tensors had each fate."""
        return dict(Counter(fate.how for _, fate in self._fates()))

    def rows(self) -> list[tuple[str, str, How, str]]:
        """Lines to print: (key, source, how, note); blocks with the same fate share a line."""
        groups: dict[tuple[str, str, How, str], list[float]] = {}
        for key, fate in self._fates():
            sources = " + ".join(dict.fromkeys(map(_any_block, fate.source)))
            line = _any_block(key or "-"), sources or "-", fate.how, fate.note
            groups.setdefault(line, []).append(fate.residual or 0.0)
        rows = []
        for (key, source, how, note), residuals in groups.items():
            times = f" x{len(residuals)}" if len(residuals) > 1 else ""
            fit = f", residual {max(residuals):.3g}" if how == "fitted" else ""
            rows.append((key + times, source, how, note + fit))
        return rows

    def _fates(self) -> Iterator[tuple[str | None, Fate]]:
        yield from ((key, self.fate(key)) for key in self.weights)
        yield from ((None, Fate("dropped", (name,), why)) for name, why in self.dropped.items())


def _any_block(name: str) -> str:
    return re.sub(r"blocks\.\d+\.", "blocks.*.", sanitize(name, 120))
