"""The prepare stage: a source of images becomes a data artifact, in one pass.

    state/work.json         the settings of unfinished work
    state/listing.jsonl     what the source lists, written before the first unit; a resumed run uses it again
    state/00012.parquet     of a unit that is done, see encode.py

Each unit is read, encoded and written once, by one worker. When all are done, repeats are left out of the index, the
captions are encoded, and mean and scale of the latents are computed from a random sample.
"""

from __future__ import annotations

import json
import shutil
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from ..artifacts import (
    STATE,
    Artifact,
    ArtifactWriter,
    AtollWarning,
    FileEntry,
    Store,
    UserError,
    canonical_json,
    differences,
    find,
    link,
    load_if_same,
    sanitize,
    write_atomic,
)
from ..executor import WORKERS_PER_GPU, Executor, fixed_threads
from ..models.autoencoders import load_autoencoder
from ..models.feature_extractors import best_extractor, extractor_id
from ..plugins import loaded_plugins
from .config import PrepareConfig
from .encode import UnitTask, encode_unit, read_unit, row_count, units_of
from .images import TOO_SMALL
from .index import Index
from .merge import fit_to_older, merge
from .progress import Progress, silent
from .shards import read_shard, write_shard
from .sources import Item, Items, Skipped, Source, SourceConfig, is_built_in, open_source
from .space import LatentConfig, TextConfig, fit_preview, scale_of, text_space
from .text import encode_conditions, pretrained_space, text_encoder, words_space

KIND = "data"
RETRIES = 3  # of a unit whose worker died
MEASURED = 50_000  # latents that mean and scale are computed from
PREVIEWS = 64  # images that the preview map is fitted to


def prepare(
    source: str | Source,
    out: str | Path | Store,
    config: PrepareConfig = PrepareConfig(),
    *,
    onto: str | Path | Store | None = None,
    executor: Executor | None = None,
    device: str = "cpu",
    progress: Progress = silent,
) -> Artifact:
    """Encode and index every image of `source` into a data artifact at `out`.

    Works in a hidden folder beside `out`; killed at any moment and called again, it resumes with the first unfinished
    unit. Memory does not grow with the images, but for the listing and the index. With `onto`, the images are added to
    those of an older data artifact, whose settings, statistics, vocabulary and classes are kept.
    """
    check_device(device)
    origin = open_source(source.rstrip("/") or source, config.source) if isinstance(source, str) else source
    check_apart(origin.place, Store.at(out))
    writer = ArtifactWriter(out, KIND, resumable=True)
    older = None if onto is None else Older.open(onto, origin)
    config = resolve(config, origin, older, earlier_choices(out, writer), device)
    if config.text_encoder not in ("words", "none"):
        pretrained_space(config.text_encoder)  # an unknown name is reported before the work
    autoencoder, features = load_autoencoder(config.autoencoder), extractor_id(str(config.features))
    assert config.size is not None, "resolved"
    shape = autoencoder.latent_shape(origin.channels, config.size)
    request = {**config.model_dump(), "autoencoder": autoencoder.id, "features": features}
    request["onto"] = None if older is None else older.data.digest
    if (there := already_there(out, request, origin)) is not None:
        return there

    with executor or Executor() as executor, writer:
        folder, gpus = writer.folder, 0 if device == "cpu" else 1 / WORKERS_PER_GPU
        items = listing(writer, origin, request)
        first = 0 if older is None else older.next_number
        units = [UnitTask(origin, unit, folder, n, config, device) for n, unit in enumerate(units_of(items), first)]
        done, total = 0, sum(map(row_count, items))
        for _, rows in executor.map(encode_unit, units, gpus, RETRIES):
            done += rows
            progress("encoding images", done, max(total, done))

        progress("indexing", 0, None)
        if not any(unit.shard.exists() for unit in units):
            why = first_skipped(units)
            shutil.rmtree(folder)  # nothing here is worth resuming
            raise UserError(f"{origin.place}: none of its images can be used; {why}")
        index, skipped, repeats = make_index(units, older)
        if older is None and not len(index.rows("train")):
            raise UserError(
                f"{origin.place}: {len(index)} images leave none for training; add some, or --set holdout=0"
            )
        units = [unit for unit in units if unit.shard.exists()]
        pq.write_table(index.table, folder / "index.parquet", compression="zstd")
        text = text_of(index, config.text_encoder) if older is None else older.text
        written = {} if older is None else older.link_into(folder)
        tasks = condition_tasks(units, index, older, text, config, device)
        for number, _ in executor.map(write_condition, tasks, gpus, RETRIES):
            progress("encoding captions", number + 1, len(units))
        if text is not None:
            # guidance and dropout need the empty caption where there is no text encoder
            write_shard(folder / "empty.safetensors", text_encoder(text, device).encode([""]))
        with fixed_threads(config.threads), torch.inference_mode():
            latent = older.latent if older is not None else measure(units, index, autoencoder.id, shape, device)
        return writer.commit(
            config={
                "request": request,
                "source": {"kind": origin.kind, "classes": origin.classes if older is None else older.classes},
                "size": config.size,
                "channels": origin.channels,
                "latent": latent.model_dump(mode="json"),
                "features": {"extractor": features, "width": read_shard(units[0].shard)["features"].shape[1]},
                "text": None if text is None else text.model_dump(mode="json"),
                "split": {"validation": config.validation, "holdout": config.holdout},
                **totals(index, repeats, older),
                "skipped": write_skipped(folder, skipped, older),
            },
            parents={} if older is None else {"data": older.data.digest},
            license=config.license,
            written=written,
            provenance={"source": origin.full_place, "plugins": loaded_plugins()},
        )


def check_device(device: str) -> None:
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        first = str(error).strip().splitlines()[0]
        raise UserError(f"--device {device}: cannot be used here ({first[:100]}); use cpu") from error


def check_apart(source: str, out: Store) -> None:
    """Refuse a place in the folder that is read: what is written there would be taken for pictures the next time."""
    if is_built_in(source) or "://" in source or not out.is_local or not Path(source).is_dir():
        return
    if out.path.resolve().is_relative_to(Path(source).resolve()):
        raise UserError(f"--out {out}: lies in {source}, the folder of the images; choose a place outside of it")


@dataclass(frozen=True)
class Older:
    """The data artifact that images are added to: its shards are linked, its spaces and classes kept."""

    data: Artifact
    index: Index
    latent: LatentConfig
    text: TextConfig | None
    labels: int  # a network has no row for others
    classes: list[str] | None

    @staticmethod
    def open(place: str | Path | Store, origin: Source) -> Older:
        """UserError if images or labels of the source that is to be added mean something else."""
        data = Artifact.open(place, KIND)
        channels, classes = data.config["channels"], data.config["source"]["classes"]
        if origin.channels != channels:
            raise UserError(f"{origin.place}: has images of {origin.channels} channels, {data.store} of {channels}")
        if origin.classes is not None and classes is None:
            raise UserError(f"{origin.place}: {data.store} has no named classes; leave out --labels folder")
        if origin.classes is not None and list(origin.classes) != classes:
            raise UserError(f"{origin.place}: its classes are not those of {data.store}; use the same folder names")
        latent = LatentConfig.model_validate(data.config["latent"])
        return Older(data, Index.of(data), latent, text_space(data), data.config["labels"] or 0, classes)

    @property
    def shards(self) -> int:
        return len(self.data.names("shard-"))

    @property
    def next_number(self) -> int:
        """Of the first shard to add; numbers of units without a usable image are missing."""
        return 1 + max(int(name[6:11]) for name in self.data.names("shard-"))

    def link_into(self, folder: Path) -> dict[str, FileEntry]:
        """Link the old shards, each checked; what a manifest lists of them."""
        names = [*self.data.names("shard-"), *self.data.names("condition-")]
        for name in names:
            link(self.data.file(name), folder / name)
        return {name: self.data.manifest.files[name] for name in names}


def resolve(
    config: PrepareConfig, origin: Source, older: Older | None, chosen: dict[str, Any], device: str
) -> PrepareConfig:
    """The settings with every default filled in, or those of the older artifact.

    `chosen` has what the same command chose before: another machine has other defaults.
    """
    if older is not None:
        if config.model_copy(update={"source": SourceConfig()}) != PrepareConfig():
            raise UserError(f"--onto {older.data.store}: its own settings hold; leave out all others")
        kept = {name: older.data.config["request"][name] for name in PrepareConfig.model_fields}
        return PrepareConfig.model_validate({**kept, "source": config.source})
    size = config.size or origin.default_size
    update = {
        "source": origin.config,
        "size": size,
        "smallest": config.smallest or max(1, size // 2),
        "features": config.features or origin.default_features or chosen.get("features") or best_extractor(device),
        # a core works fastest on what its cache holds, a GPU on what fills it
        "batch": config.batch or chosen.get("batch") or (16 if device == "cpu" else 256),
    }
    return config.model_copy(update=update)


def earlier_choices(out: str | Path | Store, writer: ArtifactWriter) -> dict[str, Any]:
    """The request of the artifact at `out`, or of unfinished work there; empty if there is neither."""
    there = find(out)
    if there is not None and there.manifest.kind == KIND:
        return dict(there.config["request"])
    work = writer.folder / STATE / "work.json"
    return dict(json.loads(work.read_bytes())["request"]) if work.exists() else {}


def already_there(out: str | Path | Store, request: dict[str, Any], origin: Source) -> Artifact | None:
    """The artifact that an earlier, equal command has made."""
    there = find(out)
    if there is None or there.manifest.kind != KIND:
        return load_if_same(out, KIND, request, {})  # None, or a line that says what is there
    try:  # unlisted, so it may be missing after a copy
        before = json.loads(there.store.read("provenance.json"))["source"]
    except FileNotFoundError:
        before = origin.full_place
    if before != origin.full_place:
        raise UserError(
            f"{there.store}: already holds the data of source {before}, not {origin.full_place}; choose another --out"
        )
    return load_if_same(out, KIND, {**there.config, "request": request}, there.manifest.parents)


def listing(writer: ArtifactWriter, origin: Source, request: dict[str, Any]) -> Items:
    """List the source and store that; or the listing of unfinished work, after printing what has changed since.

    Unfinished work on another source or with other settings is refused.
    """
    state, work = writer.folder / STATE, {"source": origin.full_place, "request": request}
    stored, record = state / "listing.jsonl", state / "work.json"
    lines = [item.to_json() for item in origin.items]
    if not record.exists():
        writer.clear()
        state.mkdir()
        write_atomic(stored, "".join(f"{line}\n" for line in lines).encode())
        write_atomic(record, canonical_json(work))
        return origin.items
    if changed := differences(json.loads(record.read_bytes()), work):
        raise UserError(
            f"{writer.folder}: holds unfinished work on another source or with other settings "
            f"({', '.join(changed)}); use the old ones or remove that folder"
        )
    before = stored.read_text().splitlines()
    if changes := changes_between(before, lines):
        warnings.warn(
            f"source {origin.place}: files differ from the listing that this work began with ({changes}); "
            "that listing is used, and later files are left out",
            AtollWarning,
            stacklevel=2,
        )
    return [Item.from_json(line) for line in before]


def changes_between(before: Sequence[str], now: Sequence[str]) -> str:
    """What has changed between two listings; empty if nothing has."""
    old, new = ({json.loads(line)["name"] for line in set(a) - set(b)} for a, b in ((before, now), (now, before)))
    counts = {"changed": len(old & new), "removed": len(old - new), "added": len(new - old)}
    told = [f"{count:,} {what}" for what, count in counts.items() if count]
    return ", ".join([*told, f"such as {sanitize(min(old | new), 80)}"]) if told else ""


def make_index(units: Sequence[UnitTask], older: Older | None) -> tuple[Index, list[Skipped], int]:
    """The index of all units, after the older data; what was skipped; and how many repeats were left out."""
    tables, skipped, shard = list[pa.Table](), list[Skipped](), 0 if older is None else older.shards
    for unit in units:
        table, part = read_unit(unit, shard)
        tables.append(table)
        skipped += part
        shard += len(table) > 0
    table = pa.concat_tables(tables)
    count = len(table)
    if older is not None:
        table, unfit = fit_to_older(table, older.text, older.labels)
        skipped += unfit
    table, dropped = merge(table, [] if older is None else older.index.ids)
    repeats = count - len(table) - sum(each.reason == "already in the data" for each in dropped)
    return Index(table if older is None else pa.concat_tables([older.index.table, table])), skipped + dropped, repeats


def first_skipped(units: Sequence[UnitTask]) -> str:
    first = next((each for unit in units for each in read_unit(unit, 0)[1]), None)
    if first is None:
        return "it holds no images"
    fix = "; choose a smaller --size" if first.reason == TOO_SMALL else ""
    detail = f" ({first.detail})" if first.detail else ""
    return f"the first one, {first.name}: {first.reason}{detail}{fix}"


def text_of(index: Index, encoder: str) -> TextConfig | None:
    """How captions are encoded; None without captions."""
    captions = index.table["captions"].combine_chunks().flatten()
    if encoder == "none" or not len(captions):
        return None
    return words_space(captions.to_pylist()) if encoder == "words" else pretrained_space(encoder)


@dataclass(frozen=True)
class ConditionTask:
    """Captions and labels of one shard to encode."""

    path: Path
    captions: list[list[str]]
    labels: list[int]
    text: TextConfig | None
    config: PrepareConfig
    device: str


def condition_tasks(
    units: Sequence[UnitTask],
    index: Index,
    older: Older | None,
    text: TextConfig | None,
    config: PrepareConfig,
    device: str,
) -> Iterator[ConditionTask]:
    """Rows of a shard that the index leaves out have no captions and no label."""
    shard, row = index.places
    for position, unit in enumerate(units, 0 if older is None else older.shards):
        count = len(read_shard(unit.shard)["latents"])
        captions, labels, rows = [list[str]() for _ in range(count)], [-1] * count, np.flatnonzero(shard == position)
        for place, texts, label in zip(row[rows], index.captions_of(rows), index.labels[rows].tolist(), strict=True):
            captions[place], labels[place] = texts, label
        yield ConditionTask(unit.condition, captions, labels, text, config, device)


def write_condition(task: ConditionTask) -> None:
    """Write labels and encoded captions of a shard, unless an earlier run has."""
    if task.path.exists():
        return
    tensors = {"labels": torch.tensor(task.labels, dtype=torch.int64)}
    if task.text is not None:
        with torch.inference_mode():
            tensors |= encode_conditions(task.text, task.captions, task.config.text, task.device)
    write_shard(task.path, tensors)


def measure(
    units: Sequence[UnitTask], index: Index, autoencoder: str, shape: tuple[int, int, int], device: str
) -> LatentConfig:
    """Mean and scale of the latents from a random sample of the training images; the preview map from a part of it."""
    shard, row = index.places
    chosen = index.shuffled("train")[:MEASURED]
    sums, count, drawn = np.zeros((2, shape[0])), len(chosen) * shape[1] * shape[2], list[torch.Tensor]()
    for number, unit in enumerate(units):
        latents = read_shard(unit.shard)["latents"]
        here = np.sort(chosen[shard[chosen] == number])
        values = latents[torch.from_numpy(row[here])].double().transpose(0, 1).flatten(1)
        sums += [values.sum(1).numpy(), values.square().sum(1).numpy()]
        drawn.append(latents[torch.from_numpy(row[np.intersect1d(here, chosen[:PREVIEWS])])])
    mean = sums[0] / count
    scale = scale_of(mean, np.sqrt(np.maximum(sums[1] / count - mean**2, 0.0)))
    space = LatentConfig(autoencoder=autoencoder, shape=shape, mean=tuple(mean.tolist()), scale=tuple(scale.tolist()))
    seen = torch.cat(drawn)
    images = load_autoencoder(autoencoder).decode(seen.to(device)).cpu()
    return space.model_copy(update={"preview": fit_preview(space.normalize(seen), images)})


def write_skipped(folder: Path, skipped: Sequence[Skipped], older: Older | None) -> dict[str, int]:
    """Write skipped.jsonl, in listing order after that of the older data; how many there are of each reason."""
    lines = [canonical_json(vars(each)) + b"\n" for each in skipped]
    before = b"" if older is None else older.data.read("skipped.jsonl")
    (folder / "skipped.jsonl").write_bytes(before + b"".join(lines))
    reasons = Counter(each.reason for each in skipped)
    if older is not None:
        reasons += Counter(older.data.config["skipped"])
    return dict(sorted(reasons.items()))


def totals(index: Index, repeats: int, older: Older | None) -> dict[str, Any]:
    """How many samples there are, in each split and without a label, how many repeats, and how many classes."""
    labels = int(index.labels.max()) + 1 if older is None else older.labels
    return {
        "count": len(index),
        "repeats": repeats + (0 if older is None else older.data.config["repeats"]),
        "splits": dict(sorted(Counter(index.splits.tolist()).items())),
        "labels": labels or None,
        "unlabelled": int((index.labels < 0).sum()),
    }
