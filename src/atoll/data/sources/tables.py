"""Tables with images in a column: parquet files, local or on the Hugging Face hub, and data sets saved to disk.

The image column holds encoded bytes, or the struct {bytes, path} that Hugging Face's data sets have. A data set
on the hub is its parquet files: hf://datasets/owner/name.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import PurePosixPath
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from ...artifacts import UserError
from ..captions import CAPTION_NAMES, LABEL_NAMES, from_fields
from .files import file_fingerprint, files_of, filesystem
from .reading import open_file
from .sample import ColorImages, Reject, Sample, Unit, sanitize

BATCH_ROWS = 256  # rows held in memory at a time


@dataclass(frozen=True)
class Tables(ColorImages):
    """`image` names the image column; None: the only one that can be it."""

    place: str
    ending: str  # .parquet or .arrow
    image: str | None = None

    @cached_property
    def classes(self) -> tuple[str, ...] | None:
        """Names of the labels, where the first file's schema knows them."""
        metadata = self._schema(files_of(self.place, self.ending)[0]).metadata or {}
        features = json.loads(metadata.get(b"huggingface", b"{}")).get("info", {}).get("features", {})
        names = next((features[n].get("names") for n in LABEL_NAMES if isinstance(features.get(n), dict)), None)
        return None if names is None else tuple(map(str, names))

    def units(self) -> list[Unit]:
        units = []
        paths = files_of(self.place, self.ending)
        image_column(self._schema(paths[0]), self.image, self.place)
        for path in paths:
            key = file_fingerprint(path)
            groups = self._parquet(path).num_row_groups if self.ending == ".parquet" else 1
            units += [Unit(f"{key}-{group}", (path,), group, group + 1) for group in range(groups)]
        return units

    def read(self, unit: Unit) -> Iterator[Sample | Reject]:
        (path,) = unit.items
        name = sanitize(PurePosixPath(path).name)
        row = 0
        try:
            for batch in self._batches(path, unit.start):
                column = image_column(batch.schema, self.image, path)
                for record in batch.to_pylist():
                    yield from sample_of(f"{name}[{unit.start}:{row}]", record.pop(column), record)
                    row += 1
        except (pa.ArrowException, OSError) as error:  # pyarrow's on damaged bytes; a failing read is a UserError
            yield Reject(f"{name}[{unit.start}:{row}]", "", "broken table", type(error).__name__)

    def _batches(self, path: str, group: int) -> Iterator[pa.RecordBatch]:
        wanted = set(CAPTION_NAMES + LABEL_NAMES)
        if self.ending == ".parquet":
            file = self._parquet(path)
            column = image_column(file.schema_arrow, self.image, path)
            columns = [n for n in file.schema_arrow.names if n == column or n in wanted]
            yield from file.iter_batches(BATCH_ROWS, row_groups=[group], columns=columns)
            return
        system, inner = filesystem(path)
        with open_file(system, inner) as stream, pa.ipc.open_stream(stream) as reader:
            column = image_column(reader.schema, self.image, path)
            for batch in reader:
                columns = [n for n in batch.schema.names if n == column or n in wanted]
                part = batch.select(columns)
                yield from (part.slice(start, BATCH_ROWS) for start in range(0, len(part), BATCH_ROWS))

    def _parquet(self, path: str) -> pq.ParquetFile:
        system, inner = filesystem(path)
        stream = open_file(system, inner)
        try:
            return pq.ParquetFile(stream)
        except (pa.ArrowException, OSError) as error:  # of the parser: a failing read is a UserError
            raise UserError(f"source {path}: not a readable parquet file ({error}); get it again") from error

    def _schema(self, path: str) -> pa.Schema:
        if self.ending == ".parquet":
            return self._parquet(path).schema_arrow
        system, inner = filesystem(path)
        stream = open_file(system, inner)
        try:
            with stream, pa.ipc.open_stream(stream) as reader:
                return reader.schema
        except (pa.ArrowException, OSError) as error:
            raise UserError(f"source {path}: not a readable arrow stream ({error}); get it again") from error


def image_column(schema: pa.Schema, chosen: str | None, where: str) -> str:
    """The column with the images."""
    possible = [field.name for field in schema if may_hold_images(field.type)]
    if chosen is not None:
        if chosen not in possible:
            raise UserError(f"--image-column {chosen}: {where} has no image column of that name, but {possible}")
        return chosen
    if len(possible) != 1:
        raise UserError(f"source {where}: {len(possible)} columns can hold images {possible}; choose --image-column")
    return str(possible[0])


def may_hold_images(kind: pa.DataType) -> bool:
    if pa.types.is_struct(kind):
        place = kind.get_field_index("bytes")
        return bool(place >= 0 and holds_bytes(kind.field(place).type))
    return holds_bytes(kind)


def holds_bytes(kind: pa.DataType) -> bool:
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind))


def sample_of(name: str, image: Any, fields: dict[str, Any]) -> Iterator[Sample | Reject]:
    content = image.get("bytes") if isinstance(image, dict) else image
    if content is None:
        yield Reject(name, "", "no image bytes")
        return
    said = from_fields(fields)
    sample = Sample(name, content, said.captions, said.label)
    yield sample
    yield from (Reject(name, sample.identity().hex(), trouble) for trouble in said.troubles)
