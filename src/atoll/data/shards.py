"""Shards: safetensors files read by memory map. The docstring is the format.

A shard holds N samples:

    latents   float32 [N, C, H, W]   as the autoencoder gives them; `LatentDataset` normalizes what it loads
    features  float32 [N, D]         only in data/, for clustering and evaluation
    labels    int64 [N]              -1 where there is none
    captions  int64 [N + 1]          the captions of sample i are the text rows captions[i] : captions[i + 1]
    tokens    [M, L] word ids or [M, L, W] embeddings, with mask bool [M, L]; or pooled [M, W];
              or, to be embedded while training, caption_text uint8 [bytes] and caption_ends int64 [M]

A shard of a cluster is one file. In data/ it is two: `shard-00012.safetensors` has latents and features and is written
by the worker that encoded them; `condition-00012.safetensors` has labels and captions and is written when repeats are
known. Repeats of an image are rows of the shard that the index leaves out; their captions are at the row that stays.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from ..artifacts import Artifact, FileEntry, UserError, sha256_bytes, write_atomic

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


def write_shard(path: Path, tensors: Mapping[str, Tensor]) -> FileEntry:
    """Write one shard in one step; what a manifest lists of it, so that it is not read to be hashed.

    There is no metadata in it: equal tensors are equal bytes.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    data = save({name: value.contiguous() for name, value in tensors.items()})
    write_atomic(path, data)
    return FileEntry(sha256=sha256_bytes(data), bytes=len(data))


def data_shards(data: Artifact) -> list[tuple[Path, Path]]:
    """The files of each shard of a data artifact, for `read_shard`; `shard` of the index counts them."""
    names = data.names("shard-")
    return [(data.file(name), data.file(name.replace("shard-", "condition-"))) for name in names]


def read_shard(*paths: Path) -> dict[str, Tensor]:
    """The tensors of one shard in these files, by memory map: only rows that are used are read."""
    shard: dict[str, Tensor] = {}
    for path in paths:
        try:
            with safe_open(path, framework="pt") as file:
                shard |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, not a dict
        except FileNotFoundError as error:
            raise UserError(
                f"{path}: shard is missing; copy it again or pass --data with the folder that has it"
            ) from error
        except (SafetensorError, OSError) as error:
            raise UserError(f"{path}: not a readable shard ({error}); copy it again") from error
    return shard


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
    """Refuse a shard whose tensors cannot belong together: it may come from an untrusted contributor."""
    if "latents" not in shard or "labels" not in shard:
        raise UserError(f"{path}: a shard needs latents and labels, this file holds {sorted(shard)}; copy it again")
    counts = {name: len(shard[name]) for name in ("latents", "labels", "features") if name in shard}
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
