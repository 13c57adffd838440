"""Shards as one data set of normalized latents with labels and text: what training, sampling and evaluation read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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


class Table:
    """Tensors [n, ...] of several shards as one [N, ...]. They stay memory-mapped until rows of them are read."""

    def __init__(self, parts: Sequence[Tensor]) -> None:
        self.parts = parts
        self.ends = np.cumsum([len(part) for part in parts], dtype=np.int64)

    def __getitem__(self, rows: Tensor) -> Tensor:
        """Rows int64 [n]; zeros where there are none at all."""
        first = self.parts[0]
        if len(self.parts) == 1 and len(first):
            return first[rows]
        found = first.new_zeros(len(rows), *first.shape[1:])
        owner = np.searchsorted(self.ends, rows.numpy(), side="right") if self.ends[-1] else np.zeros(0)
        for number in np.unique(owner).tolist():
            places = torch.from_numpy(np.flatnonzero(owner == number))
            found[places] = self.parts[number][rows[places] - int(self.ends[number - 1] if number else 0)]
        return found


class LatentDataset:
    """N samples. Rows are int64 [n] in [0, N); tensors are on the CPU, texts embedded while training on `text_device`.

    `rows` selects and orders rows of all shards, one shard after another; None: all. `text` is needed where captions
    are stored as text; they are embedded on `text_device`, batch by batch.
    """

    def __init__(
        self,
        shards: Sequence[Mapping[str, Tensor]],
        latent: LatentConfig,
        text: TextConfig | None = None,
        rows: Tensor | None = None,
    ) -> None:
        self.latent, self.text, self.text_device = latent, text, "cpu"
        self._shards, self._rows = list(shards), rows
        names = set.intersection(*(set(shard) for shard in shards)) if shards else set()
        self._tables = {name: Table([shard[name] for shard in shards]) for name in names}
        self._labels = torch.cat([torch.zeros(0, dtype=torch.int64), *(shard["labels"] for shard in shards)])
        # the captions of sample i are the text rows offsets[i] : offsets[i + 1] of all shards
        counts = [shard["captions"].diff() for shard in shards if "captions" in names]
        self._offsets = torch.cat([torch.zeros(1, dtype=torch.int64), *counts]).cumsum(0) if counts else None

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
        latent = LatentConfig.model_validate(data.config["latent"])
        shard, row = Index.of(data).places
        starts = np.cumsum([0, *(len(tensors["latents"]) for tensors in shards)])
        return cls(shards, latent, text_space(data), torch.from_numpy(starts[shard] + row))

    def __len__(self) -> int:
        return len(self._labels if self._rows is None else self._rows)

    @property
    def needs_text_encoder(self) -> bool:
        """Whether captions are stored as text, to be embedded while training."""
        return "caption_text" in self._tables

    def latents(self, rows: Tensor) -> Tensor:
        """float32 [n, C, H, W], normalized."""
        return self.latent.normalize(self._tables["latents"][self._stored(rows)])

    def features(self, rows: Tensor) -> Tensor:
        """float32 [n, D]; only data/ has them."""
        if "features" not in self._tables:
            raise UserError("these shards hold no features; use the shards of data/, not of a cluster")
        return self._tables["features"][self._stored(rows)]

    def labels(self, rows: Tensor) -> Tensor:
        """int64 [n], -1 where a sample has no label."""
        return self._labels[self._stored(rows)]

    def condition(self, rows: Tensor, u: Tensor) -> Condition:
        """What the samples are conditioned on; u [n] in [0, 1) chooses one of each sample's captions.

        Without text it is the label; a sample without a label is marked as dropped and has label 0. Labels are present
        even if no sample of this cluster has one: other clusters may have labels, and all networks are alike.

        With text it is the text; a sample without a caption is marked as dropped. `dropped` holds for all fields, so a
        missing label does not set it: labels stay -1, which a network that reads labels maps to its null label.
        """
        labels = self.labels(rows)
        if self._offsets is None:
            return Condition(labels=labels.clamp(min=0), dropped=labels < 0)
        first, end = self._offsets[self._stored(rows)], self._offsets[self._stored(rows) + 1]
        # u < 1, yet u * n may round up to n
        chosen = (first + (u.to(torch.float64) * (end - first)).long()).clamp(max=end - 1)
        caption, dropped = chosen.where(end > first, 0), end == first
        if self.needs_text_encoder:
            texts = zip(caption.tolist(), dropped.tolist(), strict=True)
            encoded = self._encoder.encode(["" if missing else self._captions[row] for row, missing in texts])
            # an encoder returns inference tensors, which cannot be trained on
            text = {name: value.clone() for name, value in encoded.items()}
        else:
            text = {name: self._tables[name][caption] for name in TEXT_FIELDS if name in self._tables}
        return Condition(labels=labels, dropped=dropped, **text)

    @cached_property
    def _captions(self) -> list[str]:
        return [text for s in self._shards for text in unpack_captions(s, range(len(s["caption_ends"])))]

    @cached_property
    def _encoder(self) -> TextEncoder:
        if self.text is None:
            raise UserError("these shards hold captions as text (--text online); pass the text space of the data")
        return text_encoder(self.text, self.text_device)

    def _stored(self, rows: Tensor) -> Tensor:
        """Rows of all shards, hidden ones included."""
        if len(rows) and (int(rows.min()) < 0 or int(rows.max()) >= len(self)):
            raise IndexError(f"rows must be in [0, {len(self)}), got {int(rows.min())} .. {int(rows.max())}")
        return rows if self._rows is None else self._rows[rows]
