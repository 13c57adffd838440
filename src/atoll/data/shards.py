"""Shards: safetensors files read by memory map, and several of them as one array of samples.

One shard holds N samples:

    latents   float32 [N, C, H, W]   normalized
    features  float32 [N, D]         only in data/, for clustering
    thumbnails uint8 [N, C, 16, 16]  only in data/, to compare with clustering by plain pixels
    labels    int64 [N]              -1 where there is none
    captions  int64 [N + 1]          the captions of sample i are the text rows captions[i] : captions[i + 1]
    tokens    [M, L] word ids or [M, L, W] embeddings, with mask bool [M, L]; or pooled [M, W];
              or, to be embedded while training, caption_text uint8 [bytes] and caption_ends int64 [M]
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from ..artifacts import FileEntry, UserError, sha256_bytes, write_atomic
from ..process import Condition
from .space import TextConfig
from .text import TextEncoder, text_encoder

TEXT_FIELDS = ("tokens", "mask", "pooled")
OFFSETS = ("captions", "caption_ends")  # count from the start of their own shard


def pack_captions(captions: Sequence[str]) -> dict[str, Tensor]:
    """Captions as tensors: their UTF-8 bytes, and where each one ends."""
    encoded = [caption.encode() for caption in captions]
    ends = np.cumsum([len(text) for text in encoded], dtype=np.int64)
    return {
        "caption_text": torch.from_numpy(np.frombuffer(b"".join(encoded), dtype=np.uint8).copy()),
        "caption_ends": torch.from_numpy(ends),
    }


def unpack_captions(shard: Mapping[str, Tensor], rows: Sequence[int]) -> list[str]:
    """Some of the captions packed in a shard."""
    text, ends = shard["caption_text"].numpy(), shard["caption_ends"]
    return [text[int(ends[row - 1]) if row else 0 : int(ends[row])].tobytes().decode() for row in rows]


def write_shard(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write one shard under its final name in one step; no metadata, so equal tensors are equal bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, shard_bytes(tensors))


def write_shard_to_list(path: Path, tensors: Mapping[str, Tensor]) -> FileEntry:
    """Write one shard as `write_shard` does; what a manifest says of it, so that nobody reads it back to find out."""
    path.parent.mkdir(parents=True, exist_ok=True)
    data = shard_bytes(tensors)
    write_atomic(path, data)
    return FileEntry(sha256=sha256_bytes(data), bytes=len(data))


def shard_bytes(tensors: Mapping[str, Tensor]) -> bytes:
    return save({name: value.contiguous() for name, value in tensors.items()})


def read_shard(path: Path) -> dict[str, Tensor]:
    """The tensors of one shard. They lie in the file's memory map: only the rows one touches are read."""
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, not a dict
    except FileNotFoundError as error:
        raise UserError(
            f"{path}: shard is missing; copy it again or pass --data with the folder that has it"
        ) from error
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path}: not a readable shard ({error}); copy it again") from error


def join_shards(parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Several parts as one shard; caption offsets are shifted to go on where the last part ended."""
    whole = {name: torch.cat([part[name] for part in parts]) for name in parts[0] if name not in OFFSETS}
    if "captions" in parts[0]:
        counts = torch.cat([part["captions"].diff() for part in parts])
        whole["captions"] = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    if "caption_ends" in parts[0]:
        shifts = np.cumsum([0, *(len(part["caption_text"]) for part in parts[:-1])]).tolist()
        whole["caption_ends"] = torch.cat([p["caption_ends"] + shift for p, shift in zip(parts, shifts, strict=True)])
    return whole


def check_shard(path: Path, shard: Mapping[str, Tensor]) -> None:
    """Refuse a shard whose tensors cannot belong together: it may come from a stranger."""
    if "latents" not in shard or "labels" not in shard:
        raise UserError(f"{path}: a shard needs latents and labels, this file holds {sorted(shard)}; copy it again")
    counts = {name: len(shard[name]) for name in ("latents", "labels", "features", "thumbnails") if name in shard}
    texts = {name: len(shard[name]) for name in (*TEXT_FIELDS, "caption_ends") if name in shard}
    if "captions" in shard:
        offsets = shard["captions"]
        counts["captions"] = len(offsets) - 1
        texts["captions"] = int(offsets[-1])
        if int(offsets[0]) != 0 or bool((offsets.diff() < 0).any()):
            raise UserError(f"{path}: its caption offsets do not rise from 0; copy it again")
    for group in (counts, texts):
        if len(set(group.values())) > 1:
            raise UserError(f"{path}: its tensors differ in length ({group}); copy it again")


def chosen_captions(offsets: Tensor, rows: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """A caption for each row of one shard, chosen by u [n] in [0, 1), and whether it has any; 0 where it has none."""
    first, end = offsets[rows], offsets[rows + 1]
    some = end > first
    # u < 1, yet u * n may round up to n
    chosen = (first + (u.to(torch.float64) * (end - first)).long()).clamp(max=end - 1)
    return torch.where(some, chosen, torch.zeros_like(chosen)), some


class ShardSet:
    """Several shards as one list of samples, in the order of `paths`.

    Rows are int64 [n], counted through all shards. Tensors come back on the CPU, copied out of the map.
    `text` is needed only where captions are stored as text, to be embedded here and now, on `text_device`, where the
    embeddings stay; it may be set until the first batch.
    """

    def __init__(self, paths: Sequence[Path], text: TextConfig | None = None, text_device: str = "cpu") -> None:
        self._space, self.text_device = text, text_device
        self._shards = [read_shard(Path(path)) for path in paths]
        for path, shard in zip(paths, self._shards, strict=True):
            check_shard(path, shard)
        self._ends = np.cumsum([len(shard["latents"]) for shard in self._shards], dtype=np.int64)
        self._captioned = any("captions" in shard for shard in self._shards)

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    @property
    def has_texts(self) -> bool:
        """Whether captions are kept as text, which an encoder must read."""
        return any("caption_text" in shard for shard in self._shards)

    def latents(self, rows: Tensor) -> Tensor:
        """float32 [n, C, H, W], normalized."""
        return self._gather("latents", rows)

    def features(self, rows: Tensor) -> Tensor:
        """float32 [n, D]; only shards of data/ have them."""
        return self._gather("features", rows)

    def thumbnails(self, rows: Tensor) -> Tensor:
        """uint8 [n, C, 16, 16] or smaller; only shards of data/ have them."""
        return self._gather("thumbnails", rows)

    def labels(self, rows: Tensor) -> Tensor:
        """int64 [n], -1 where a sample has no label."""
        return self._gather("labels", rows)

    def condition(self, rows: Tensor, u: Tensor) -> Condition:
        """What the samples are conditioned on; u [n] in [0, 1) chooses one of each sample's captions.

        Without text it is the label, and a sample without one is marked as dropped, with 0 in its place. Labels are
        there even if no sample of this set has one, since those of other clusters may, and all networks are alike.

        With text it is the text, and a sample without a caption is marked as dropped. `dropped` is one for all
        fields, so a missing label does not set it, or the caption would be lost: labels come along with -1 for none,
        which a network that reads labels takes for its null label.
        """
        labels = self.labels(rows)
        if self._captioned:
            return Condition(labels=labels, **self._text(rows, u))
        missing = labels < 0
        return Condition(labels=labels.clamp(min=0), dropped=missing if bool(missing.any()) else None)

    def pick(self, rows: Tensor, u: Tensor) -> dict[str, Tensor]:
        """What a batch carries: `x0` [n, C, H, W] and the fields of its condition; `u` as for `condition`."""
        return {"x0": self.latents(rows), **self.condition(rows, u).tensors()}

    def fetch(self, batch: Mapping[str, Tensor]) -> tuple[Tensor, Condition]:
        """Latents [B, C, H, W] and the condition of a batch that `pick` made, wherever it is now."""
        return batch["x0"], Condition.of(batch)

    def nbytes(self) -> int:
        """Memory that all of it would take."""
        names = ("latents", *TEXT_FIELDS)
        return sum(shard[name].nbytes for shard in self._shards for name in names if name in shard)

    def text_tables(self) -> dict[str, Tensor]:
        """Texts of all shards, one after another: `tokens` and `mask`, or `pooled`; empty where there are none."""
        return {
            name: torch.cat([shard[name] for shard in self._shards])
            for name in TEXT_FIELDS
            if self._shards and name in self._shards[0]
        }

    def caption_rows(self, rows: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
        """For each sample a row of `text_tables`, chosen by u [n]; and whether it has a caption at all, bool [n]."""
        texts = [int(shard["captions"][-1]) for shard in self._shards]
        starts = dict(zip(map(id, self._shards), np.cumsum([0, *texts[:-1]]).tolist(), strict=True))

        def choose(shard: dict[str, Tensor], local: Tensor, places: Tensor) -> dict[str, Tensor]:
            chosen, some = chosen_captions(shard["captions"], local, u[places])
            return {"rows": torch.where(some, chosen + starts[id(shard)], 0), "some": some}

        found = self._collect(rows, choose)
        return found["rows"], found["some"]

    def _text(self, rows: Tensor, u: Tensor) -> dict[str, Tensor]:
        def choose(shard: dict[str, Tensor], local: Tensor, places: Tensor) -> dict[str, Tensor]:
            rows_of_text, some = chosen_captions(shard["captions"], local, u[places])
            picked: dict[str, Tensor] = {}
            if "caption_text" in shard:
                texts = unpack_captions(shard, rows_of_text[some].tolist())
                captions = iter(texts)
                encoded = self._encoder.encode([next(captions) if there else "" for there in some.tolist()])
                # an encoder answers with inference tensors, which cannot be trained on
                picked = {name: value.clone() for name, value in encoded.items()}
            for name in TEXT_FIELDS:
                if name in shard:
                    table = shard[name]
                    picked[name] = table[rows_of_text] if len(table) else table.new_zeros(len(local), *table.shape[1:])
            for value in picked.values():
                value[~some.to(value.device)] = 0
            return picked | {"dropped": ~some}

        text = self._collect(rows, choose)
        if not bool(text["dropped"].any()):
            del text["dropped"]
        return text

    @cached_property
    def _encoder(self) -> TextEncoder:
        if self._space is None:
            raise UserError("these shards hold captions as text (--text online); pass the text space of the data")
        return text_encoder(self._space, self.text_device)

    def _gather(self, name: str, rows: Tensor) -> Tensor:
        def pick(shard: dict[str, Tensor], local: Tensor, _: Tensor) -> dict[str, Tensor]:
            if name not in shard:
                raise UserError(f"these shards hold no {name}; use the shards of data/, not of a cluster")
            return {name: shard[name][local]}

        return self._collect(rows, pick)[name]

    def _collect(
        self, rows: Tensor, pick: Callable[[dict[str, Tensor], Tensor, Tensor], dict[str, Tensor]]
    ) -> dict[str, Tensor]:
        """Ask each shard for its part of `rows` and put the answers back in the order asked."""
        rows = torch.as_tensor(rows, dtype=torch.int64)
        if len(rows) and (int(rows.min()) < 0 or int(rows.max()) >= len(self)):
            raise IndexError(f"rows must be in [0, {len(self)}), got {int(rows.min())} .. {int(rows.max())}")
        owner = np.searchsorted(self._ends, rows.numpy(), side="right")
        result: dict[str, Tensor] = {}
        for index in np.unique(owner).tolist() or ([0] if self._shards else []):
            places = torch.from_numpy(np.flatnonzero(owner == index))
            start = int(self._ends[index - 1]) if index else 0
            for name, value in pick(self._shards[index], rows[places] - start, places).items():
                if name not in result:
                    result[name] = value.new_empty(len(rows), *value.shape[1:])
                result[name][places.to(value.device)] = value
        return result


class ResidentSamples:
    """All samples of some shards in a device's memory: a batch carries row numbers, and is gathered there.

    Captions stored as text cannot lie there; they are embedded batch by batch, as a ShardSet does.
    """

    def __init__(self, samples: ShardSet, device: torch.device) -> None:
        self._samples = samples
        self._latents = samples.latents(torch.arange(len(samples))).to(device)
        self._text = {name: value.to(device) for name, value in samples.text_tables().items() if len(value)}

    def __len__(self) -> int:
        return len(self._samples)

    def latents(self, rows: Tensor) -> Tensor:
        """float32 [n, C, H, W], on the device."""
        return self._latents[rows.to(self._latents.device)]

    def pick(self, rows: Tensor, u: Tensor) -> dict[str, Tensor]:
        """What a batch carries: `row` int64 [n], `caption` int64 [n] if texts lie on the device, and what does not."""
        if not self._text:
            condition = self._samples.condition(rows, u)
            return {"row": rows, **condition.tensors()}
        captions, some = self._samples.caption_rows(rows, u)
        return {"row": rows, "caption": captions, "labels": self._samples.labels(rows), "dropped": ~some}

    def fetch(self, batch: Mapping[str, Tensor]) -> tuple[Tensor, Condition]:
        """Latents [B, C, H, W] and the condition of a batch that has arrived on the device."""
        text = {name: table[batch["caption"]] for name, table in self._text.items()}
        return self._latents[batch["row"]], Condition.of({**batch, **text})
