"""Shards as one data set of normalized latents with labels and text: what training, sampling and evaluation read."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Self

import numpy as np
import torch
from torch import Tensor

from ..artifacts import Artifact, UserError
from ..diffusion import Condition
from .shards import TEXT_FIELDS, check_shard, data_shards, read_shard, unpack_captions
from .space import LatentConfig, TextConfig, text_space
from .text import TextEncoder, text_encoder

COPIED_AT_ONCE = 4096  # rows, on the way to a device


class LatentDataset:
    """N samples. Rows are int64 [n] in [0, N); tensors are on the CPU until `to` moves them.

    Shards are memory-mapped: only rows that are read take memory. `rows` selects and orders rows of all shards, one
    shard after another; None: all. `text` is needed where captions are stored as text; they are embedded on
    `text_device`, batch by batch.
    """

    def __init__(
        self,
        shards: Sequence[Mapping[str, Tensor]],
        latent: LatentConfig,
        text: TextConfig | None = None,
        rows: Tensor | None = None,
    ) -> None:
        self.latent, self.text, self.text_device = latent, text, "cpu"
        self._shards = list(shards)
        self._ends = np.cumsum([len(shard["latents"]) for shard in shards], dtype=np.int64)
        self._rows = rows
        self._labels = torch.cat([torch.zeros(0, dtype=torch.int64), *(shard["labels"] for shard in shards)])
        self._captioned = any("captions" in shard for shard in shards)
        self._resident: Tensor | None = None
        self._resident_text: dict[str, Tensor] = {}

    @classmethod
    def open(cls, paths: Sequence[Path], latent: LatentConfig, text: TextConfig | None = None) -> Self:
        """All rows of some shards, each checked: they may come from an untrusted contributor."""
        shards = [read_shard(path) for path in paths]
        for path, shard in zip(paths, shards, strict=True):
            check_shard(path, shard)
        return cls(shards, latent, text)

    @classmethod
    def of(cls, data: Artifact) -> Self:
        """A data artifact: row i is row i of its index, so repeats are left out."""
        from .index import Index  # needs pyarrow, which islands may not have

        shards = [read_shard(*paths) for paths in data_shards(data)]
        starts = np.cumsum([0, *(len(shard["latents"]) for shard in shards)])
        shard, row = Index.of(data).places
        latent = LatentConfig.model_validate(data.config["latent"])
        return cls(shards, latent, text_space(data), torch.from_numpy(starts[shard] + row))

    def to(self, device: torch.device) -> Self:
        """The same samples with latents and embedded text in the memory of `device`."""
        moved = copy.copy(self)
        rows = torch.arange(len(self))
        moved._resident = torch.empty(len(self), *self.latent.shape, device=device)
        for part in rows.split(COPIED_AT_ONCE):
            moved._resident[part.to(device)] = self.latents(part).to(device)
        for name in TEXT_FIELDS:
            tables = [shard[name] for shard in self._shards if name in shard]
            if sum(map(len, tables)):
                moved._resident_text[name] = torch.cat(tables).to(device)
        return moved

    def __len__(self) -> int:
        return len(self._labels if self._rows is None else self._rows)

    @property
    def needs_text_encoder(self) -> bool:
        """Whether captions are stored as text, to be embedded while training."""
        return any("caption_text" in shard for shard in self._shards)

    def nbytes(self) -> int:
        """Memory that all latents and embedded texts take."""
        names = ("latents", *TEXT_FIELDS)
        return sum(shard[name].nbytes for shard in self._shards for name in names if name in shard)

    def latents(self, rows: Tensor) -> Tensor:
        """float32 [n, C, H, W], normalized; on the device after `to`."""
        if self._resident is not None:
            return self._resident[rows.to(self._resident.device)]
        return self.latent.normalize(self._gather("latents", rows))

    def features(self, rows: Tensor) -> Tensor:
        """float32 [n, D]; only data/ has them."""
        return self._gather("features", rows)

    def labels(self, rows: Tensor) -> Tensor:
        """int64 [n], -1 where a sample has no label."""
        return self._labels[self._stored_rows(rows)]

    def condition(self, rows: Tensor, u: Tensor) -> Condition:
        """What the samples are conditioned on; u [n] in [0, 1) chooses one of each sample's captions.

        Without text it is the label; a sample without a label is marked as dropped and has label 0. Labels are present
        even if no sample of this cluster has one: other clusters may have labels, and all networks are alike.

        With text it is the text; a sample without a caption is marked as dropped. `dropped` holds for all fields, so a
        missing label does not set it: labels stay -1, which a network that reads labels maps to its null label.
        """
        labels = self.labels(rows)
        if self._captioned:
            return Condition(labels=labels, **self._text(rows, u))
        missing = labels < 0
        return Condition(labels=labels.clamp(min=0), dropped=missing if bool(missing.any()) else None)

    def pick(self, rows: Tensor, u: Tensor) -> dict[str, Tensor]:
        """What a batch carries to the device, for `fetch`; `u` as for `condition`."""
        if self._resident is None:
            return {"x0": self.latents(rows), **self.condition(rows, u).tensors()}
        if not self._resident_text:
            return {"row": rows, **self.condition(rows, u).tensors()}
        captions, has_caption = self._caption_rows(rows, u)
        return {"row": rows, "caption": captions, "labels": self.labels(rows), "dropped": ~has_caption}

    def fetch(self, batch: Mapping[str, Tensor]) -> tuple[Tensor, Condition]:
        """Latents [B, C, H, W] and the condition of a batch that `pick` made, where the batch is now."""
        if self._resident is None:
            return batch["x0"], Condition.of(batch)
        text = {name: table[batch["caption"]] for name, table in self._resident_text.items()}
        return self._resident[batch["row"]], Condition.of({**batch, **text})

    def _caption_rows(self, rows: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
        """For each sample a row of all shards' texts, chosen by u [n]; and whether it has a caption, bool [n]."""
        texts = [int(shard["captions"][-1]) for shard in self._shards]
        starts = dict(zip(map(id, self._shards), np.cumsum([0, *texts[:-1]]).tolist(), strict=True))

        def choose(shard: Mapping[str, Tensor], local: Tensor, places: Tensor) -> dict[str, Tensor]:
            chosen, has_caption = choose_captions(shard["captions"], local, u[places])
            return {"rows": torch.where(has_caption, chosen + starts[id(shard)], 0), "has_caption": has_caption}

        found = self._collect(rows, choose)
        return found["rows"], found["has_caption"]

    def _text(self, rows: Tensor, u: Tensor) -> dict[str, Tensor]:
        def choose(shard: Mapping[str, Tensor], local: Tensor, places: Tensor) -> dict[str, Tensor]:
            text_rows, has_caption = choose_captions(shard["captions"], local, u[places])
            picked: dict[str, Tensor] = {}
            if "caption_text" in shard:
                texts = iter(unpack_captions(shard, text_rows[has_caption].tolist()))
                encoded = self._encoder.encode([next(texts) if has else "" for has in has_caption.tolist()])
                # an encoder returns inference tensors, which cannot be trained on
                picked = {name: value.clone() for name, value in encoded.items()}
            for name in TEXT_FIELDS:
                if name in shard:
                    table = shard[name]
                    picked[name] = table[text_rows] if len(table) else table.new_zeros(len(local), *table.shape[1:])
            for value in picked.values():
                value[~has_caption.to(value.device)] = 0
            return picked | {"dropped": ~has_caption}

        text = self._collect(rows, choose)
        if not bool(text["dropped"].any()):
            del text["dropped"]
        return text

    @cached_property
    def _encoder(self) -> TextEncoder:
        if self.text is None:
            raise UserError("these shards hold captions as text (--text online); pass the text space of the data")
        return text_encoder(self.text, self.text_device)

    def _gather(self, name: str, rows: Tensor) -> Tensor:
        def pick(shard: Mapping[str, Tensor], local: Tensor, _: Tensor) -> dict[str, Tensor]:
            if name not in shard:
                raise UserError(f"these shards hold no {name}; use the shards of data/, not of a cluster")
            return {name: shard[name][local]}

        return self._collect(rows, pick)[name]

    def _stored_rows(self, rows: Tensor) -> Tensor:
        """Rows of all shards, hidden ones included."""
        if len(rows) and (int(rows.min()) < 0 or int(rows.max()) >= len(self)):
            raise IndexError(f"rows must be in [0, {len(self)}), got {int(rows.min())} .. {int(rows.max())}")
        return rows if self._rows is None else self._rows[rows]

    def _collect(
        self, rows: Tensor, pick: Callable[[Mapping[str, Tensor], Tensor, Tensor], dict[str, Tensor]]
    ) -> dict[str, Tensor]:
        """`pick` from each shard its part of `rows`, and put the parts back in the order of `rows`."""
        stored = self._stored_rows(rows)
        owner = np.searchsorted(self._ends, stored.numpy(), side="right")
        result: dict[str, Tensor] = {}
        for number in np.unique(owner).tolist() or ([0] if self._shards else []):
            places = torch.from_numpy(np.flatnonzero(owner == number))
            start = int(self._ends[number - 1]) if number else 0
            for name, value in pick(self._shards[number], stored[places] - start, places).items():
                if name not in result:
                    result[name] = value.new_empty(len(rows), *value.shape[1:])
                result[name][places.to(value.device)] = value
        return result


def choose_captions(offsets: Tensor, rows: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """A caption for each row of one shard, chosen by u [n] in [0, 1), and whether it has one; 0 where it has none."""
    first, end = offsets[rows], offsets[rows + 1]
    has_caption = end > first
    # u < 1, yet u * n may round up to n
    chosen = (first + (u.to(torch.float64) * (end - first)).long()).clamp(max=end - 1)
    return torch.where(has_caption, chosen, torch.zeros_like(chosen)), has_caption
