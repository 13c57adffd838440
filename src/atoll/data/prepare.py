"""The prepare stage: a source of images becomes a data artifact, in one pass.

    state/work.json         the settings of unfinished work
    state/listing.jsonl     what the source lists, written before the first unit; a resumed run uses it again
    state/00012.*           of the units that are done, see units.py

Each unit is read, encoded and written once, by one worker. When all are done, repeats are left out of the index, the
captions are encoded, and mean and scale of the latents are computed from a random sample.
"""

from __future__ import annotations

import json
import os
import shutil
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from pydantic import BaseModel, ConfigDict, Field

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
from ..executor import WORKERS_PER_GPU, Executor
from ..models.autoencoders import load_autoencoder
from ..models.feature_extractors import best_extractor, extractor_id
from ..plugins import loaded_plugins
from .images import TOO_SMALL
from .index import SCHEMA, Index, Repeats
from .progress import Progress, silent
from .shards import read_shard, write_shard
from .sources import Skipped, Source, SourceConfig, is_built_in, open_source
from .space import LatentConfig, TextConfig, fit_latents, text_space
from .text import Words, encode_conditions, pretrained_space, text_encoder
from .units import EncodeConfig, UnitResult, UnitTask, encode_unit, row_count, units_of

KIND = "data"
RETRIES = 3  # of a unit whose worker died
MEASURED = 50_000  # latents that mean and scale are computed from
PREVIEWS = 64  # images that the preview map is fitted to


class PrepareConfig(BaseModel):
    """How to prepare. Everything here can change the result, so all but `source` is in the manifest.

    How a source is read depends on how it is stored, and one set stored in two ways is one artifact.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    source: SourceConfig = SourceConfig()
    size: int | None = Field(default=None, gt=0, description="side of the square images; None: the source's own")
    smallest: int | None = Field(default=None, gt=0, description="shortest side accepted; None: half of size")
    autoencoder: str = Field(default="pixels", description="pixels, dct-4, taef2, or a diffusers folder or id")
    features: str | None = Field(default=None, description="pixels, efficientnet-lite0, dinov2; None: the best here")
    text_encoder: str = Field(default="words", description="words, clip:PLACE, t5:PLACE, minilm, or none")
    text: Literal["cache", "online"] = Field(default="cache", description="online: islands embed captions themselves")
    validation: float = Field(default=0.05, ge=0, lt=1, description="share of the samples an island validates on")
    holdout: float = Field(default=0.05, ge=0, lt=1, description="share no island ever sees")
    batch: int | None = Field(
        default=None, gt=0, description="images per call of an encoder, part of the last bits; None: 8, on a GPU 256"
    )
    license: str | None = Field(default=None, description="license of the images, recorded in all that is made of them")
    threads: int = Field(default=1, gt=0, description="CPU threads per worker; part of the result's last bits")


def check_apart(source: str, out: Store) -> None:
    """Refuse a place in the folder that is read: what is written there would be taken for pictures the next time."""
    if is_built_in(source) or "://" in source or not out.is_local or not Path(source).is_dir():
        return
    if out.path.resolve().is_relative_to(Path(source).resolve()):
        raise UserError(f"--out {out}: lies in {source}, the folder of the images; choose a place outside of it")


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
    unit. Memory does not grow with the images, but for their ids. With `onto`, the images are added to those of an
    older data artifact, whose settings, statistics, vocabulary and classes are kept.
    """
    check_device(device)
    origin = open_source(source.rstrip("/") or source, config.source) if isinstance(source, str) else source
    source = origin.place
    check_apart(source, Store.at(out))
    writer = ArtifactWriter(out, KIND, resumable=True)
    older = None if onto is None else Older.open(onto)
    config = resolve(config, origin, older, earlier_choices(out, writer), device)
    assert config.size is not None, "resolved above"
    assert config.features is not None, "resolved above"
    if older is not None:
        older.check_fits(origin, source)
    if config.text_encoder not in ("words", "none"):
        pretrained_space(config.text_encoder)  # an unknown name is reported before the work
    autoencoder, features = load_autoencoder(config.autoencoder), extractor_id(config.features)
    latent_shape = autoencoder.latent_shape(origin.channels, config.size)
    request = {
        **config.model_dump(exclude={"source"}),
        "labels": config.source.labels,
        "autoencoder": autoencoder.id,
        "features": features,
        "onto": None if older is None else older.data.digest,
    }
    reading = {"source": source, **config.source.model_dump()}
    if (there := already_there(out, request, reading)) is not None:
        return there

    with executor or Executor() as executor, writer:
        folder = writer.folder
        listing, total = store_listing(writer, origin, source, {"reading": reading, "request": request})
        encoding = encode_config(config, origin.channels, device, total, older)
        units = read_units(listing, origin, folder, 0 if older is None else older.shards, encoding)
        gpus, done = 0 if device == "cpu" else 1 / WORKERS_PER_GPU, 0
        for _, rows in executor.map(encode_unit, units, gpus, RETRIES):
            done += rows
            progress("encoding images", done, max(total, done))
        made = Made.read(units)
        if not made.units:
            why = first_skipped(made.skipped)
            shutil.rmtree(folder)  # nothing here is worth resuming
            raise UserError(f"{source}: none of its images can be used; {why}")

        progress("indexing", 0, None)
        repeats = Repeats.among([unit.path(".parquet") for unit in made.units], None if older is None else older.index)
        written = made.written | ({} if older is None else older.take_over(folder))
        write_index(folder / "index.parquet", made.units, repeats, older)
        index = Index(pq.read_table(folder / "index.parquet"))
        if older is None and not len(index.rows("train")):
            raise UserError(f"{source}: {len(index)} images leave none for training; add images, or --set holdout=0")
        text = made.text(config.text_encoder) if older is None else older.text
        texts = condition_tasks(made.units, repeats, text, config.text, device)
        for number, (_, entry) in enumerate(executor.map(write_conditions, texts, gpus, RETRIES)):
            written[entry[0]] = entry[1]
            progress("encoding captions", number + 1, len(made.units))
        if text is not None:
            # guidance and dropout need the empty caption where there is no text encoder
            written["empty.safetensors"] = write_shard(
                folder / "empty.safetensors", text_encoder(text, device).encode([""])
            )
        latent = older.latent if older is not None else measure(made.units, index, autoencoder.id, latent_shape)
        skipped = write_skipped(folder, made, repeats, reading, older)
        shape = read_shard(folder / f"shard-{made.units[0].number:05d}.safetensors")["features"].shape
        result = {
            "request": request,
            "source": {"kind": origin.kind, "classes": origin.classes if older is None else older.classes},
            "size": config.size,
            "channels": origin.channels,
            "latent": latent.model_dump(mode="json"),
            "features": {"extractor": features, "width": shape[1]},
            "text": None if text is None else text.model_dump(mode="json"),
            "split": {"validation": config.validation, "holdout": config.holdout},
            **totals(index, made.rows - skipped["already in the data"], older),
            "skipped": dict(sorted((reason, count) for reason, count in skipped.items() if count)),
        }
        return writer.commit(
            config=result,
            parents={} if older is None else {"data": older.data.digest},
            license=config.license,
            written=written,
            provenance={"plugins": loaded_plugins()},
        )


def check_device(device: str) -> None:
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        first = str(error).strip().splitlines()[0]
        raise UserError(f"--device {device}: cannot be used here ({first[:100]}); use cpu") from error


def resolve(
    config: PrepareConfig, origin: Source, older: Older | None, chosen: dict[str, Any], device: str
) -> PrepareConfig:
    """The settings with every default filled in, or those of the older artifact.

    `chosen` has what the same command chose before: another machine has other defaults.
    """
    if older is not None:
        if config.model_copy(update={"source": SourceConfig()}) != PrepareConfig():
            raise UserError(f"--onto {older.data.store}: its own settings hold; leave out all others")
        request = older.data.config["request"]
        kept = {name: value for name, value in request.items() if name in PrepareConfig.model_fields}
        return PrepareConfig(**{**kept, "source": config.source})
    size = config.size or origin.default_size
    update = {
        "size": size,
        "smallest": config.smallest or max(1, size // 2),
        "features": config.features or origin.default_features or chosen.get("features") or best_extractor(device),
        # a core works fastest on what its cache holds, a GPU on what fills it
        "batch": config.batch or chosen.get("batch") or (8 if device == "cpu" else 256),
    }
    return config.model_copy(update=update)


def earlier_choices(out: str | Path | Store, writer: ArtifactWriter) -> dict[str, Any]:
    """The request of the artifact at `out`, or of unfinished work there; empty if there is neither."""
    there = find(out)
    if there is not None and there.manifest.kind == KIND:
        return dict(there.config["request"])
    work = writer.folder / STATE / "work.json"
    return dict(json.loads(work.read_bytes())["request"]) if work.exists() else {}


def already_there(out: str | Path | Store, request: dict[str, Any], reading: dict[str, Any]) -> Artifact | None:
    """The artifact that an earlier, equal command has made."""
    there = find(out)
    if there is None or there.manifest.kind != KIND:
        return load_if_same(out, KIND, request, {})  # None, or a line that says what is there
    try:  # unlisted, so it may be missing after a copy
        before = json.loads(there.store.read("log.jsonl").splitlines()[0])
    except FileNotFoundError:
        before = reading
    places = [place if "://" in place else os.path.abspath(place) for place in (before["source"], reading["source"])]
    if places[0] != places[1]:
        raise UserError(
            f"{there.store}: already holds the data of source {before['source']}, not {reading['source']}; "
            "choose another --out"
        )
    if changed := differences({**before, "source": ""}, {**reading, "source": ""}):
        raise UserError(
            f"{there.store}: already holds this source read in another way ({', '.join(changed)}); choose another --out"
        )
    return load_if_same(out, KIND, {**there.config, "request": request}, there.manifest.parents)


def store_listing(
    writer: ArtifactWriter, origin: Source, source: str, work: dict[str, Any]
) -> tuple[list[tuple[int, int]], int]:
    """List the source and store that, or find the listing of unfinished work; where each unit lies in it, and all rows.

    Unfinished work with other settings is refused. What has changed since it was listed is printed.
    """
    state = writer.folder / STATE
    listing, record = state / "listing.jsonl", state / "work.json"
    items = origin.items
    lines = [item.to_json().encode() + b"\n" for item in items]
    if record.exists() and listing.exists():
        before = json.loads(record.read_bytes())
        if changed := differences({"reading": before["reading"], "request": before["request"]}, work):
            raise UserError(
                f"{writer.folder}: holds unfinished work on another source or with other settings "
                f"({', '.join(changed)}); use the old ones or remove that folder"
            )
        stored = listing.read_bytes().splitlines(keepends=True)
        warn_of_changes(source, stored, lines)
        return [tuple(unit) for unit in before["units"]], before["total"]
    writer.clear()
    state.mkdir()
    sizes = dict(zip(map(id, items), map(len, lines), strict=True))
    ends = np.cumsum([0, *(sum(sizes[id(item)] for item in unit) for unit in units_of(items))]).tolist()
    units, total = list(pairwise(ends)), sum(map(row_count, items))
    write_atomic(listing, b"".join(lines))
    write_atomic(record, canonical_json({**work, "units": units, "total": total}))
    return units, total


def warn_of_changes(source: str, stored: Sequence[bytes], now: Sequence[bytes]) -> None:
    """Print how a source has changed since its listing was stored."""
    names = [{json.loads(line)["name"] for line in set(a) - set(b)} for a, b in ((stored, now), (now, stored))]
    gone, added = names[0] - names[1], names[1] - names[0]
    counts = {"changed": names[0] & names[1], "removed": gone, "added": added}
    if any(counts.values()):
        told = ", ".join(f"{len(found):,} {what}" for what, found in counts.items() if found)
        example = sanitize(min(set().union(*counts.values())), 80)
        warnings.warn(
            f"source {source}: files differ from the listing that this work began with ({told}, such as {example}); "
            "that listing is used, and later files are left out",
            AtollWarning,
            stacklevel=3,
        )


def encode_config(config: PrepareConfig, channels: int, device: str, total: int, older: Older | None) -> EncodeConfig:
    assert config.size is not None, "resolved"
    assert config.smallest is not None, "resolved"
    assert config.features is not None, "resolved"
    assert config.batch is not None, "resolved"
    return EncodeConfig(
        size=config.size,
        channels=channels,
        smallest=config.smallest,
        autoencoder=config.autoencoder,
        features=config.features,
        batch=config.batch,
        threads=config.threads,
        device=device,
        validation=config.validation,
        holdout=config.holdout,
        previews=0.0 if older is not None else 2 * PREVIEWS / max(1, total),
        text=None if older is None else older.text,
        labels=None if older is None else older.labels,
    )


def read_units(
    places: Sequence[tuple[int, int]], origin: Source, folder: Path, first: int, config: EncodeConfig
) -> list[UnitTask]:
    listing = folder / STATE / "listing.jsonl"
    return [
        UnitTask(origin, listing, start, stop, folder, first + number, config)
        for number, (start, stop) in enumerate(places)
    ]


@dataclass(frozen=True)
class Made:
    """What the workers have left: units with images, in listing order, and all that was skipped."""

    units: list[UnitTask]
    rows: int
    written: dict[str, FileEntry]
    words: set[str]
    longest: int
    skipped: list[Skipped]

    @staticmethod
    def read(units: Sequence[UnitTask]) -> Made:
        made = Made([], 0, {}, set(), 0, [])
        rows, longest = 0, 0
        for unit in units:
            result = UnitResult.read(unit.path(".json"))
            made.skipped.extend(Skipped(**json.loads(line)) for line in unit.path(".skipped.jsonl").open())
            if result.shard is not None:
                made.units.append(unit)
                made.written[f"shard-{unit.number:05d}.safetensors"] = result.shard
                made.words.update(result.words)
                rows, longest = rows + result.rows, max(longest, result.longest)
        return Made(made.units, rows, made.written, made.words, longest, made.skipped)

    def text(self, encoder: str) -> TextConfig | None:
        """How captions are encoded; None without captions."""
        if encoder == "none" or self.longest == 0:
            return None
        return Words.of(self.words, self.longest).space if encoder == "words" else pretrained_space(encoder)


@dataclass(frozen=True)
class Older:
    """The data artifact that images are added to: its shards are linked, its spaces and classes kept."""

    data: Artifact
    index: Index

    @staticmethod
    def open(place: str | Path | Store) -> Older:
        data = Artifact.open(place, KIND)
        return Older(data, Index.of(data))

    @property
    def latent(self) -> LatentConfig:
        return LatentConfig.model_validate(self.data.config["latent"])

    @property
    def text(self) -> TextConfig | None:
        return text_space(self.data)

    @property
    def labels(self) -> int:
        """How many classes there are: a network has no row for others."""
        return int(self.data.config["labels"] or 0)

    @property
    def classes(self) -> list[str] | None:
        names = self.data.config["source"]["classes"]
        return None if names is None else list(names)

    @property
    def shards(self) -> int:
        """The number of the first shard to add."""
        return 1 + max(int(name[6:11]) for name in self.data.names("shard-"))

    def check_fits(self, origin: Source, source: str) -> None:
        """Refuse a source whose images or labels mean something else."""
        store, channels = self.data.store, self.data.config["channels"]
        if origin.channels != channels:
            raise UserError(f"{source}: has images of {origin.channels} channels, {store} of {channels}")
        if origin.classes is not None and self.classes is None:
            raise UserError(f"{source}: {store} has no named classes; leave out --labels folder")
        if origin.classes is not None and list(origin.classes) != self.classes:
            raise UserError(f"{source}: its classes are not those of {store}; use the same folder names")

    def take_over(self, folder: Path) -> dict[str, FileEntry]:
        """Link the old shards into `folder`, each checked."""
        names = [*self.data.names("shard-"), *self.data.names("condition-")]
        for name in names:
            link(self.data.file(name), folder / name)
        return {name: self.data.manifest.files[name] for name in names}


def write_index(path: Path, units: Sequence[UnitTask], repeats: Repeats, older: Older | None) -> None:
    """The rows that stay, after those of the older data; one row group per shard."""
    start, first = repeats.known, 0
    with pq.ParquetWriter(path, SCHEMA, compression="zstd") as writer:
        if older is not None:
            writer.write_table(older.index.table)
            first = len(older.data.names("shard-"))
        for shard, unit in enumerate(units, first):
            table = repeats.table(unit.path(".parquet"), start)
            start += len(table)
            rows = np.flatnonzero(table["kept"].to_numpy())
            table = table.take(pa.array(rows))
            columns = {
                "id": [identity.hex() for identity in table["id"].to_pylist()],
                "shard": np.full(len(rows), shard, np.int32),
                "row": rows.astype(np.int32),
                **{name: table[name].combine_chunks() for name in ("captions", "label", "split")},
            }
            writer.write_table(pa.table(columns, schema=SCHEMA))


@dataclass(frozen=True)
class ConditionTask:
    """The captions and labels of one shard to encode."""

    unit: UnitTask
    captions: list[list[str]]
    labels: list[int]
    text: TextConfig | None
    storage: Literal["cache", "online"]
    device: str


def condition_tasks(
    units: Sequence[UnitTask],
    repeats: Repeats,
    text: TextConfig | None,
    storage: Literal["cache", "online"],
    device: str,
) -> Iterator[ConditionTask]:
    start = repeats.known
    for unit in units:
        table = repeats.table(unit.path(".parquet"), start)
        start += len(table)
        labels = table["label"].fill_null(-1).to_pylist()
        yield ConditionTask(unit, table["captions"].to_pylist(), labels, text, storage, device)


def write_conditions(task: ConditionTask) -> tuple[str, FileEntry]:
    """Write labels and encoded captions of a shard; the file's name and what the manifest lists of it."""
    name = f"condition-{task.unit.number:05d}.safetensors"
    path, marker = task.unit.folder / name, task.unit.path(".condition.json")
    if not marker.exists():
        with torch.inference_mode():
            tensors = encode_conditions(task.text, task.captions, task.storage, task.device)
        entry = write_shard(path, {**tensors, "labels": torch.tensor(task.labels, dtype=torch.int64)})
        write_atomic(marker, canonical_json(entry.model_dump()))
    return name, FileEntry.model_validate_json(marker.read_bytes())


def measure(units: Sequence[UnitTask], index: Index, autoencoder: str, shape: tuple[int, int, int]) -> LatentConfig:
    """Mean and scale of the latents from a random sample of the training images; the preview map from another."""
    shard, row = index.places
    chosen = np.sort(index.shuffled("train")[:MEASURED])
    sums, drawn, images = np.zeros((3, shape[0])), list[torch.Tensor](), list[bytes]()
    for number, unit in enumerate(units):
        latents = read_shard(unit.folder / f"shard-{unit.number:05d}.safetensors")["latents"]
        values = latents[torch.from_numpy(row[chosen[shard[chosen] == number]])].double().transpose(0, 1).flatten(1)
        sums += [values.sum(1).numpy(), values.square().sum(1).numpy(), np.full(shape[0], values.shape[1])]
        if len(drawn) < PREVIEWS:
            previews = pq.read_table(unit.path(".parquet"), columns=["preview"])["preview"].to_pylist()
            for place in row[(shard == number) & (index.splits == "train")].tolist():
                if previews[place] is not None and len(drawn) < PREVIEWS:
                    drawn.append(latents[place])
                    images.append(previews[place])
    return fit_latents(autoencoder, shape, sums, drawn, images)


def write_skipped(
    folder: Path, made: Made, repeats: Repeats, reading: dict[str, Any], older: Older | None
) -> Counter[str]:
    """skipped.jsonl by id and log.jsonl by name; how many of each reason.

    A file's name is no content, so the listed file has ids and reasons, sorted; the names are in the unlisted log.
    """
    skipped = list(made.skipped)
    start = repeats.known
    for unit in made.units:
        ids = pq.read_table(unit.path(".parquet"), columns=["id"])["id"].to_pylist()
        first = repeats.first[start : start + len(ids)]
        known = np.flatnonzero(first < repeats.known)
        skipped += [Skipped("", ids[row].hex(), "already in the data") for row in known.tolist()]
        skipped += [
            Skipped("", ids[row - start].hex(), "conflicting labels")
            for row in repeats.conflicts
            if start <= row < start + len(ids)
        ]
        start += len(ids)
    lines = [canonical_json({"id": s.id, "reason": s.reason, "detail": s.detail}) for s in skipped]
    reasons = Counter(each.reason for each in skipped)
    if older is not None:
        lines += older.data.read("skipped.jsonl").splitlines()
        reasons += Counter(older.data.config["skipped"])
    log = [canonical_json(reading), *(canonical_json({"skipped": vars(each)}) for each in skipped)]
    for name, content in (("skipped.jsonl", sorted(lines)), ("log.jsonl", log)):
        (folder / name).write_bytes(b"".join(line + b"\n" for line in content))
    return reasons


def first_skipped(skipped: Sequence[Skipped]) -> str:
    if not skipped:
        return "it holds no images"
    first = skipped[0]
    fix = "; choose a smaller --size" if first.reason == TOO_SMALL else ""
    detail = f" ({first.detail})" if first.detail else ""
    return f"the first one, {sanitize(first.name)}: {first.reason}{detail}{fix}"


def totals(index: Index, rows: int, older: Older | None) -> dict[str, Any]:
    """How many samples there are, in each split and without a label, how many repeats, and how many classes."""
    before = {"count": 0, "repeats": 0} if older is None else older.data.config
    labels = int(index.labels.max()) + 1 if older is None else older.data.config["labels"]
    return {
        "count": len(index),
        "repeats": before["repeats"] + rows - (len(index) - before["count"]),
        "splits": dict(sorted(Counter(index.splits.tolist()).items())),
        "labels": labels or None,
        "unlabelled": int((index.labels < 0).sum()),
    }
