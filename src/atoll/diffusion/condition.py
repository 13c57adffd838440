"""What the samples of a batch are conditioned on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class Condition:
    """One condition per sample; every field is optional and has the batch first.

    labels   int64 [B]                 class indices, -1 where a sample has none: the same as dropped, for labels only
    pooled   float [B, D]              one text vector per sample
    tokens   float [B, L, D]           text token embeddings, or int64 [B, L] word ids (the `words` encoder)
    mask     bool [B, L]               True where `tokens` holds a real token
    dropped  bool [B]                  True where the sample is to be treated as unconditional

    A network reads the one field its config names and puts its own null embedding where `dropped` is set, so
    training dropout, guidance and `null()` are the same thing.
    """

    labels: Tensor | None = None
    pooled: Tensor | None = None
    tokens: Tensor | None = None
    mask: Tensor | None = None
    dropped: Tensor | None = None

    def __post_init__(self) -> None:
        sizes = {name: len(value) for name, value in self.tensors().items()}
        if not sizes:
            raise ValueError("a Condition needs at least one field; pass None for no condition")
        if len(set(sizes.values())) > 1:
            raise ValueError(f"the fields of a Condition differ in batch size: {sizes}")

    def __len__(self) -> int:
        return len(next(iter(self.tensors().values())))

    def __getitem__(self, rows: slice | Tensor) -> Condition:
        """The condition of some samples: a slice, an index tensor or a boolean mask."""
        return self._map(lambda value: value[rows])

    def to(self, device: torch.device | str) -> Condition:
        return self._map(lambda value: value.to(device))

    def tensors(self) -> dict[str, Tensor]:
        """The fields that are there, by name."""
        return {f.name: v for f in fields(Condition) if (v := getattr(self, f.name)) is not None}

    @staticmethod
    def of(tensors: Mapping[str, Tensor]) -> Condition:
        """The condition among some tensors by name; those of other names are not looked at."""
        return Condition(**{f.name: tensors[f.name] for f in fields(Condition) if f.name in tensors})

    def drop(self, which: Tensor) -> Condition:
        """The same condition with the samples where `which` (bool [B]) is True made unconditional."""
        return replace(self, dropped=which if self.dropped is None else self.dropped | which)

    def null(self) -> Condition:
        """The unconditional twin of this batch."""
        anything = next(iter(self.tensors().values()))
        return self.drop(torch.ones(len(self), dtype=torch.bool, device=anything.device))

    @staticmethod
    def cat(parts: Sequence[Condition]) -> Condition:
        """Join batches. A `dropped` missing in some parts counts as False there."""
        joined: dict[str, Tensor | None] = {}
        for f in fields(Condition):
            values = [getattr(part, f.name) for part in parts]
            if all(v is None for v in values):
                continue
            if f.name == "dropped":
                device = next(v.device for v in values if v is not None)
                values = [
                    torch.zeros(len(part), dtype=torch.bool, device=device) if v is None else v
                    for part, v in zip(parts, values, strict=True)
                ]
            if any(v is None for v in values):
                raise ValueError(f"cannot join conditions: {f.name} is missing in some of them")
            joined[f.name] = torch.cat(values)
        return Condition(**joined)

    def _map(self, change: Callable[[Tensor], Tensor]) -> Condition:
        return Condition(**{name: change(value) for name, value in self.tensors().items()})


@dataclass(frozen=True, kw_only=True, eq=False)
class NegativeCondition(Condition):
    """A condition whose twin in guidance is a negative prompt [B] instead of no prompt."""

    negative: Condition

    def null(self) -> Condition:
        return self.negative

    def _map(self, change: Callable[[Tensor], Tensor]) -> Condition:
        kept = {name: change(value) for name, value in self.tensors().items()}
        return NegativeCondition(**kept, negative=self.negative._map(change))
