"""Second half of prepare: encode the images of one range of ids, and normalize when the statistics are known.

Images are encoded in id order in batches of a fixed size with a fixed number of threads, so that a piece is the
same bits whichever worker makes it and in whatever order the source was read. A shard is a few pieces joined:
pieces are small, so that there is work for every core and little to do again after a crash.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from ..artifacts import FileEntry, canonical_json, write_atomic
from ..models.autoencoders import load_autoencoder
from ..models.feature_extractors import load_extractor
from .gather import slices_of_range, unite, write_table
from .index import SCHEMA, split_of
from .predecessor import known_ids
from .preview import color_sums, fitted, shrunk
from .shards import join_shards, pack_captions, read_shard, write_shard, write_shard_to_list
from .space import LatentConfig, TextConfig
from .text import split_words, text_encoder


@dataclass(frozen=True)
class Encoders:
    """What turns images and captions into tensors, by name: each worker loads its own."""

    autoencoder: str
    features: str
    text: TextConfig | None
    text_storage: Literal["cache", "online"]
    device: str


@dataclass(frozen=True)
class EncodeTask:
    """Range `number` of `ranges` of the ids in merged chunks: a piece of a shard to encode, not yet normalized.

    Ids in the index `known` are left out, and labels from `classes` on: for samples that come late, both are given.
    The map for previews is fitted on the pieces that are `sampled`.
    """

    number: int
    ranges: int
    runs: tuple[Path, ...]
    folder: Path
    encoders: Encoders
    image_shape: tuple[int, int, int]
    batch: int
    threads: int
    validation: float
    holdout: float
    known: Path | None
    classes: int | None
    sampled: bool


def encode(task: EncodeTask) -> int:
    """Encode one piece, unless an earlier run has finished it; the number of samples it holds."""
    marker = task.folder / f"{task.number:05d}.json"
    if marker.exists():
        return int(json.loads(marker.read_bytes())["count"])
    gathered = unite(slices_of_range(task.runs, task.number, task.ranges), task.image_shape)
    known = known_ids(task.known, gathered.ids) if task.known is not None else set()
    gathered = gathered.without(known)
    captions, strange = understood_captions(task.encoders.text, gathered.captions)
    known_labels, unknown = understood_labels(task.classes, gathered.labels)
    splits = [split_of(identity, task.validation, task.holdout) for identity in gathered.ids]
    train = torch.tensor([name == "train" for name in splits], dtype=torch.bool)
    with fixed_threads(task.threads), torch.inference_mode():
        images = encode_images(task.encoders, gathered.pixels, task.batch)
        small = images.pop("small")
        colors = color_sums(images["latents"][train], small[train]) if task.sampled else None
        text = encode_captions(task.encoders, captions)
    labels = torch.tensor([-1 if label is None else label for label in known_labels], dtype=torch.int64)
    write_shard(task.folder / f"{task.number:05d}.safetensors", {**images, "labels": labels, **text})

    count = len(gathered.ids)
    table = pa.table(
        {
            "id": [identity.hex() for identity in gathered.ids],
            "shard": [None] * count,  # not known yet: several pieces make a shard
            "row": [None] * count,
            "captions": captions,
            "label": known_labels,
            "split": splits,
        },
        schema=SCHEMA,
    )
    write_table(task.folder / f"{task.number:05d}.arrow", table)
    summary = {
        "count": count,
        "splits": {name: splits.count(name) for name in sorted(set(splits))},
        "unlabelled": int((labels < 0).sum()),
        "largest_label": max(labels.tolist(), default=-1),
        "notes": {
            "conflicting labels": [identity.hex() for identity in gathered.conflicts],
            "already in the data": sorted(identity.hex() for identity in known),
            "bad caption: words no network knows": [gathered.ids[row].hex() for row in strange],
            "unknown label": [gathered.ids[row].hex() for row in unknown],
        },
        **moments(images["latents"][train]),
        "colors": colors,
    }
    write_atomic(marker, canonical_json(summary))
    return count


def understood_captions(space: TextConfig | None, captions: list[list[str]]) -> tuple[list[list[str]], list[int]]:
    """Captions without those that `words` networks have no rows for, and the samples that lost one.

    That happens to samples that come late, when the vocabulary is fixed; other encoders take anything.
    """
    if space is None or space.kind != "words":
        return captions, []
    vocabulary = set(space.vocabulary or ())

    def understood(caption: str) -> bool:
        words = split_words(caption)
        return len(words) <= space.length and vocabulary.issuperset(words)

    kept = [[text for text in texts if understood(text)] for texts in captions]
    return kept, [row for row, texts in enumerate(captions) if len(kept[row]) < len(texts)]


def understood_labels(classes: int | None, labels: list[int | None]) -> tuple[list[int | None], list[int]]:
    """Labels without those that networks for `classes` labels have no row for, and the samples that lost theirs.

    None: the labels are the first ones, and decide how many there are.
    """
    if classes is None:
        return labels, []
    kept = [None if label is None or label >= classes else label for label in labels]
    return kept, [row for row, label in enumerate(labels) if label != kept[row]]


def encode_images(encoders: Encoders, pixels: np.ndarray, batch: int) -> dict[str, Tensor]:
    """`latents` float32 [N, C, H, W] as the autoencoder gives them, `features` float32 [N, D], and
    `small`: the images at the latents' size."""
    autoencoder = load_autoencoder(encoders.autoencoder)
    extractor = load_extractor(encoders.features, encoders.device)
    parts = []
    for start in range(0, max(1, len(pixels)), batch):
        # filled up with black images that are cut off again: a library such as cuDNN plans every convolution anew for
        # every batch size it meets, and with a last batch of any size a GPU took three times as long (docs/log.md)
        full = np.zeros((batch, *pixels.shape[1:]), np.uint8)
        full[: len(pixels) - start] = pixels[start : start + batch]
        # channels last: what convolutions are fastest on, on CPUs and GPUs alike
        images = torch.from_numpy(full).to(encoders.device).contiguous(memory_format=torch.channels_last)
        latents = autoencoder.encode(images).float()
        part = {
            "latents": latents,
            "features": extractor.extract(images).float(),
            "small": shrunk(images, latents),
        }
        parts.append({name: value.cpu().contiguous() for name, value in part.items()})
    return {name: torch.cat([part[name] for part in parts])[: len(pixels)] for name in parts[0]}


def encode_captions(encoders: Encoders, captions: Sequence[Sequence[str]]) -> dict[str, Tensor]:
    """`captions` offsets int64 [N + 1] and the text of all captions, one after another: embedded, or as it is."""
    if encoders.text is None:
        return {}
    ends = torch.tensor([len(texts) for texts in captions], dtype=torch.int64).cumsum(0)
    flat = [text for texts in captions for text in texts]
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), ends])
    if encoders.text_storage == "online":
        return {"captions": offsets, **pack_captions(flat)}
    # each is embedded once: images of a class share theirs. The empty one comes along, for a shard without captions
    place = {text: row for row, text in enumerate(dict.fromkeys([*flat, ""]))}
    encoded = text_encoder(encoders.text, encoders.device).encode(list(place))
    rows = torch.tensor([place[text] for text in flat], dtype=torch.int64)
    return {"captions": offsets, **{name: value.cpu()[rows] for name, value in encoded.items()}}


def moments(latents: Tensor) -> dict[str, list[float] | int]:
    """Per channel: sum and sum of squares in float64, and how many values each is over."""
    values = latents.double().transpose(0, 1).flatten(1)  # [C, N H W]
    return {"values": values.shape[1], "sum": values.sum(1).tolist(), "squares": values.square().sum(1).tolist()}


def latent_space(autoencoder: str, shape: tuple[int, int, int], summaries: Sequence[dict[str, Any]]) -> LatentConfig:
    """Mean and std per channel over the train split; a channel that never changes keeps its scale."""
    values = sum(s["values"] for s in summaries)
    mean = np.sum([s["sum"] for s in summaries], axis=0) / values
    variance = np.sum([s["squares"] for s in summaries], axis=0) / values - mean**2
    # below the rounding error of the subtraction there is no variance to speak of
    still = variance <= 1e-12 * np.maximum(mean**2, 1e-12)
    std = np.where(still, 1.0, np.sqrt(np.maximum(variance, 0.0)))
    preview = fitted([s["colors"] for s in summaries if s.get("colors")], mean.tolist(), scale_of(std).tolist())
    return LatentConfig(
        autoencoder=autoencoder,
        shape=shape,
        mean=tuple(mean.tolist()),
        scale=tuple(scale_of(std).tolist()),
        preview=preview,
    )


def scale_of(std: np.ndarray) -> np.ndarray:
    """The scale per channel that normalized latents are divided by, from their standard deviation [C]."""
    return std


@dataclass(frozen=True)
class NormalizeTask:
    """The encoded pieces of one shard, to be joined and normalized into `out`; `marker` is written last."""

    pieces: tuple[Path, ...]
    out: Path
    marker: Path


@dataclass(frozen=True)
class FinishedShard:
    """A shard in its place: its name, how many samples it holds, and what the manifest says of it."""

    name: str
    rows: int
    file: FileEntry


def normalize(task: NormalizeTask) -> FinishedShard:
    """Write the final shard, unless an earlier run has finished it."""
    if not (task.marker.exists() and task.out.exists()):
        whole = join_shards([read_shard(piece) for piece in task.pieces])
        file = write_shard_to_list(task.out, whole)
        write_atomic(task.marker, canonical_json({"rows": len(whole["labels"]), "file": file.model_dump()}))
    record = json.loads(task.marker.read_bytes())
    return FinishedShard(task.out.name, int(record["rows"]), FileEntry.model_validate(record["file"]))


@contextmanager
def fixed_threads(count: int) -> Iterator[None]:
    """Compute with `count` threads inside: sums depend on how they are split."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
