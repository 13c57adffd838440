"""The prepare stage: a source of images becomes a data artifact."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from pydantic import BaseModel, ConfigDict, Field

from ..artifacts import STATE, Artifact, ArtifactWriter, Store, UserError, canonical_json, sanitize
from ..executor import WORKERS_PER_GPU, Executor
from ..models.autoencoders import load_autoencoder
from ..models.feature_extractors import best_extractor, extractor_id
from ..plugins import loaded_plugins
from .earlier import KIND, already_there, begin, chosen_before, digest_of
from .encode import Encoders, EncodeTask, NormalizeTask, encode, latent_space, normalize
from .gather import GatherTask, gather, read_rejects, read_table
from .images import TOO_SMALL
from .index import SCHEMA
from .merge import merge_to_few
from .predecessor import Predecessor
from .progress import Progress, silent
from .shards import read_shard, write_shard
from .sources import Skipped, Source, SourceConfig, is_built_in, open_source
from .space import TextConfig
from .text import Words, pretrained_space, text_encoder
from .units import Unit, units_of

RETRIES = 3  # of a part whose worker died
PIECES = 8  # parts of a shard that are encoded one by one


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
    shard_rows: int = Field(default=4096, gt=0, description="samples per shard, about")
    batch: int | None = Field(
        default=None, gt=0, description="images per call of an encoder, part of the last bits; None: 8, on a GPU 256"
    )
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
    """Decode, encode and index every image of `source` into a data artifact at `out`.

    Works in a hidden folder beside `out`; killed at any moment and called again, it goes on with the first
    unfinished unit or shard. Memory does not grow with the data. With `onto`, the samples are added to those of
    an older data artifact, whose settings hold.
    """
    check_device(device)
    origin = open_source(source.rstrip("/") or source, config.source) if isinstance(source, str) else source
    source = origin.place
    check_apart(source, Store.at(out))
    draft = ArtifactWriter(out, KIND, resumable=True)
    old = None if onto is None else Predecessor.open(onto)
    config = resolve(config, origin, old, chosen_before(out, draft), device)
    assert config.size is not None, "resolved above"
    assert config.features is not None, "resolved above"
    image_shape = (origin.channels, config.size, config.size)
    if old is not None:
        old.check_fits(origin.channels, origin.classes, source)
    if config.text_encoder not in ("words", "none"):
        pretrained_space(config.text_encoder)  # a name that means nothing is better known before the work
    autoencoder, features = load_autoencoder(config.autoencoder), extractor_id(config.features)
    latent_shape = autoencoder.latent_shape(origin.channels, config.size)
    request = {
        **config.model_dump(exclude={"source"}),
        "labels": config.source.labels,
        "autoencoder": autoencoder.id,
        "features": features,
        "onto": None if old is None else old.artifact.digest,
    }
    reading = {"source": source, **config.source.model_dump()}
    if (there := already_there(out, request, reading)) is not None:
        return there
    units = units_of(origin.items)

    gpus = 0 if device == "cpu" else 1 / WORKERS_PER_GPU
    with executor or Executor() as executor, draft:
        state = draft.folder / STATE
        chunks, encoded = state / "chunks", state / "encoded"
        begin(draft, {**reading, "size": config.size, "smallest": config.smallest, "files": digest_of(units)}, request)
        for folder in (chunks, encoded):
            folder.mkdir(parents=True, exist_ok=True)

        rows = 0
        for _, unit_rows in executor.map(gather, gather_tasks(origin, units, chunks, config), retries=RETRIES):
            rows += unit_rows
            progress("reading images", rows, None)
        if rows == 0:
            why = first_reject(chunks)
            shutil.rmtree(draft.folder)  # nothing here is worth going on with
            raise UserError(f"{source}: none of its images can be used; {why}")

        runs = merge_to_few(chunks, executor, progress)
        text = text_space(config.text_encoder, runs) if old is None else old.text
        encoders = Encoders(config.autoencoder, config.features, text, config.text, device)
        shards = -(-rows // config.shard_rows)
        tasks = encode_tasks(runs, shards * PIECES, encoded, encoders, image_shape, config, old)
        count = 0
        for _, shard_count in executor.map(encode, tasks, gpus, RETRIES):
            count += shard_count
            progress("encoding", count, rows)

        summaries = [json.loads((encoded / f"{task.number:05d}.json").read_bytes()) for task in tasks]
        if old is None and not sum(summary["values"] for summary in summaries):
            raise UserError(f"{source}: {count} images leave none for training; add images, or --set holdout=0")
        space = latent_space(autoencoder.id, latent_shape, summaries) if old is None else old.latent
        first = 0 if old is None else len(old.shards)
        targets = [
            NormalizeTask(
                tuple(encoded / f"{piece:05d}.safetensors" for piece in pieces_of(number)),
                draft.folder / "shards" / f"{first + number:05d}.safetensors",
                encoded / f"{number:05d}.shard.json",
            )
            for number in range(shards)
        ]
        done = 0
        written = {} if old is None else old.take_over(draft.folder)
        for _, shard in executor.map(normalize, targets, retries=RETRIES):
            written[f"shards/{shard.name}"] = shard.file
            done += shard.rows
            progress("writing shards", done, count)

        write_index(draft.folder / "index.parquet", encoded, shards, old)
        if text is not None:
            # guidance and dropout may ask for it long after the encoder is gone
            write_shard(draft.folder / "empty.safetensors", text_encoder(text, device).encode([""]))
        rejected = write_rejects(draft.folder, chunks, [s["notes"] for s in summaries], reading, old)
        result = {
            "request": request,
            "source": {
                "kind": origin.kind,
                "classes": origin.classes if old is None else old.classes,
            },
            "size": config.size,
            "channels": origin.channels,
            "latent": space.model_dump(mode="json"),
            "features": {"extractor": features, "width": feature_width(draft.folder)},
            "text": None if text is None else text.model_dump(mode="json"),
            "split": {"validation": config.validation, "holdout": config.holdout},
            **totals(summaries, rows, old),
            "rejected": rejected,
        }
        parents = {} if old is None else {"data": old.artifact.digest}
        provenance = {"plugins": loaded_plugins()}
        return draft.commit(config=result, parents=parents, written=written, provenance=provenance)


def check_device(device: str) -> None:
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        first = str(error).strip().splitlines()[0]
        raise UserError(f"--device {device}: cannot be used here ({first[:100]}); use cpu") from error


def resolve(
    config: PrepareConfig, origin: Source, old: Predecessor | None, features: str | None, device: str
) -> PrepareConfig:
    """The settings with every default filled in; those of the older artifact, where there is one.

    `features` is what the same command chose before: which is best may change with the network, halfway.
    """
    if old is not None:
        if config.model_copy(update={"source": SourceConfig()}) != PrepareConfig():
            raise UserError(f"--onto {old.artifact.store}: its own settings hold; leave out all others")
        request = {
            name: value for name, value in old.artifact.config["request"].items() if name in PrepareConfig.model_fields
        }
        return PrepareConfig(**{**request, "source": config.source})
    size = config.size or origin.default_size
    return config.model_copy(
        update={
            "size": size,
            "smallest": config.smallest or max(1, size // 2),
            "features": config.features or origin.default_features or features or best_extractor(device),
            # a core works fastest on what its cache holds, a GPU on what fills it
            "batch": config.batch or (8 if device == "cpu" else 256),
        }
    )


def encode_tasks(
    runs: tuple[Path, ...],
    pieces: int,
    folder: Path,
    encoders: Encoders,
    image_shape: tuple[int, int, int],
    config: PrepareConfig,
    old: Predecessor | None,
) -> list[EncodeTask]:
    assert config.batch is not None, "resolved by prepare"
    return [
        EncodeTask(
            number=number,
            ranges=pieces,
            runs=runs,
            folder=folder,
            encoders=encoders,
            image_shape=image_shape,
            batch=config.batch,
            threads=config.threads,
            validation=config.validation,
            holdout=config.holdout,
            known=None if old is None else old.index,
            classes=None if old is None else old.labels,
            # ids are hashes, so the first shard is a random sample, and no sum grows with the data
            sampled=old is None and number in pieces_of(0),
        )
        for number in range(pieces)
    ]


def totals(summaries: Sequence[dict[str, Any]], rows: int, old: Predecessor | None) -> dict[str, Any]:
    """How many samples there are, in each split and without a label, and how many classes there are.

    With those of the older artifact, whose classes stay as they are: experts have a row for each of them.
    """
    count = sum(summary["count"] for summary in summaries)
    splits = sum((Counter(summary["splits"]) for summary in summaries), Counter[str]())
    labels = (1 + max(int(summary["largest_label"]) for summary in summaries)) or None  # -1 where nobody has one
    unlabelled = sum(summary["unlabelled"] for summary in summaries)
    repeats = rows - count
    if old is not None:
        before = old.artifact.config
        labels, unlabelled = before["labels"], unlabelled + old.unlabelled
        count, repeats = count + before["count"], repeats + before["repeats"]
        splits += Counter(before["splits"])
    return {
        "labels": labels,
        "unlabelled": unlabelled,
        "count": count,
        "splits": dict(sorted(splits.items())),
        "repeats": repeats,
    }


def gather_tasks(source: Source, units: Sequence[Unit], folder: Path, config: PrepareConfig) -> list[GatherTask]:
    assert config.size is not None, "resolved by prepare"
    assert config.smallest is not None, "resolved by prepare"
    return [
        GatherTask(source, unit, number, folder, config.size, source.channels, config.smallest)
        for number, unit in enumerate(units)
    ]


def text_space(name: str, runs: Sequence[Path]) -> TextConfig | None:
    """The text space of the encoder of this name, for the captions in these runs; None without captions."""
    if name == "none" or next(all_captions(runs), None) is None:
        return None
    if name == "words":
        return Words.of(all_captions(runs)).space
    return pretrained_space(name)


def all_captions(runs: Sequence[Path]) -> Iterator[str]:
    for run in runs:
        for batch in read_table(run.with_suffix(".arrow")).to_batches():
            for texts in batch["captions"].to_pylist():
                yield from texts


def pieces_of(shard: int) -> range:
    """The numbers of the pieces that make a shard: their ranges of ids are parts of its range."""
    return range(shard * PIECES, (shard + 1) * PIECES)


def write_index(path: Path, encoded: Path, shards: int, old: Predecessor | None) -> None:
    """One row group per shard, so that a range of ids is found without reading the rest."""
    first = 0
    with pq.ParquetWriter(path, SCHEMA, compression="zstd") as writer:
        if old is not None:
            first = len(old.shards)
            with pq.ParquetFile(old.index) as before:
                for group in range(before.num_row_groups):
                    writer.write_table(before.read_row_group(group))
        for number in range(shards):
            table = pa.concat_tables(read_table(encoded / f"{piece:05d}.arrow") for piece in pieces_of(number))
            places = {"shard": [first + number] * len(table), "row": range(len(table))}
            for name, values in places.items():
                column = table.schema.get_field_index(name)
                table = table.set_column(column, SCHEMA.field(name), pa.array(values, pa.int32()))
            writer.write_table(table.combine_chunks())


def write_rejects(
    folder: Path,
    chunks: Path,
    notes: Sequence[dict[str, list[str]]],
    reading: dict[str, Any],
    old: Predecessor | None,
) -> dict[str, int]:
    """rejects.jsonl by content, log.jsonl by name; how many of each reason.

    A file's name says nothing about its content, and renaming files must not change the artifact: so the listed
    file holds ids and reasons, sorted, and the names stand in the unlisted log.
    """
    rejects = list(read_rejects(chunks))
    rejects += [Skipped("", identity, reason) for note in notes for reason, ids in note.items() for identity in ids]
    lines = [canonical_json({"id": r.id, "reason": r.reason, "detail": r.detail}) for r in rejects]
    reasons = Counter(reject.reason for reject in rejects)
    if old is not None:
        lines += old.artifact.read("rejects.jsonl").splitlines()
        reasons += Counter(old.artifact.config["rejected"])
    (folder / "rejects.jsonl").write_bytes(b"".join(line + b"\n" for line in sorted(lines)))
    log = [canonical_json(reading), *(canonical_json({"rejected": vars(r)}) for r in rejects)]
    (folder / "log.jsonl").write_bytes(b"".join(line + b"\n" for line in log))
    return dict(sorted(reasons.items()))


def first_reject(chunks: Path) -> str:
    reject = next(read_rejects(chunks), None)
    if reject is None:
        return "it holds no images"
    fix = "; choose a smaller --size" if reject.reason == TOO_SMALL else ""
    detail = f" ({reject.detail})" if reject.detail else ""
    return f"the first one, {sanitize(reject.name)}: {reject.reason}{detail}{fix}"


def feature_width(folder: Path) -> int:
    return int(read_shard(folder / "shards" / "00000.safetensors")["features"].shape[1])
