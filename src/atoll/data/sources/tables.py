"""Tables with images in a column: parquet files, local or on the Hugging Face hub, and data sets saved to disk.

The image column holds encoded bytes, or the struct {bytes, path} of Hugging Face's data sets. A data set on the hub
is its parquet files: hf://datasets/owner/name.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from ...artifacts import UserError, sanitize
from ..captions import CAPTION_NAMES, LABEL_NAMES, from_fields
from .source import END, Example, Item, Items, Skipped, Source, row_items, source

BATCH_ROWS = 256  # rows in memory at a time

Result = TypeVar("Result")


class Tables(Source):
    """Files of rows. The schema of the first file is checked when they are listed."""

    options = ("image_column",)

    @cached_property
    def classes(self) -> tuple[str, ...] | None:
        """Names of the labels, where the first file's schema has them."""
        metadata = self._first_schema.metadata or {}
        features = json.loads(metadata.get(b"huggingface", b"{}")).get("info", {}).get("features", {})
        names = next((features[n].get("names") for n in LABEL_NAMES if isinstance(features.get(n), dict)), None)
        return None if names is None else tuple(map(str, names))

    @property
    def _first_schema(self) -> pa.Schema:
        return self._opened(self.files.ending_with(self.endings)[0], self.schema)

    def list(self) -> Items:
        image_column(self._first_schema, self.config.image_column, self.place)
        items: Items = []
        for name in self.files.ending_with(self.endings):
            start, stamp = 0, self.files.stamps[name]
            for rows in self._opened(name, self.parts):
                items += [Item(name, stamp, stop=END)] if rows == END else row_items(name, stamp, rows, start)
                start += rows
        return items

    def read(self, item: Item) -> Iterator[Example | Skipped]:
        assert item.stop is not None, "rows of a table"
        name, row = sanitize(item.name), item.start
        try:
            for batch in self.batches(item.name, item.start, item.stop):
                column = image_column(batch.schema, self.config.image_column, item.name)
                for fields in batch.to_pylist():
                    yield from examples_of(f"{name}[{row}]", fields.pop(column), fields)
                    row += 1
        except (pa.ArrowException, OSError) as error:  # pyarrow's on damaged bytes; a failing read is a UserError
            yield Skipped(f"{name}[{row}]", "", "broken table", type(error).__name__)

    def columns(self, schema: pa.Schema, name: str) -> Sequence[str]:
        """The columns that are read."""
        image = image_column(schema, self.config.image_column, name)
        return [column for column in schema.names if column == image or column in CAPTION_NAMES + LABEL_NAMES]

    def _opened(self, name: str, use: Callable[[str], Result]) -> Result:
        try:
            return use(name)
        except (pa.ArrowException, OSError) as error:
            raise UserError(
                f"source {self.place}: {name} is not a readable {self.format} file ({error}); get it again"
            ) from error

    def schema(self, name: str) -> pa.Schema:
        raise NotImplementedError

    def parts(self, name: str) -> Sequence[int]:
        """Rows of each part of a file that is read on its own; [END] where counting them would read the file."""
        raise NotImplementedError

    def batches(self, name: str, start: int, stop: int) -> Iterator[pa.RecordBatch]:
        """Rows start : stop of a file, at most BATCH_ROWS at a time."""
        raise NotImplementedError


@source("parquet", endings=(".parquet",))
class Parquet(Tables):
    """A part is a row group."""

    def schema(self, name: str) -> pa.Schema:
        return self._file(name).schema_arrow

    def parts(self, name: str) -> Sequence[int]:
        metadata = self._file(name).metadata
        return [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]

    def batches(self, name: str, start: int, stop: int) -> Iterator[pa.RecordBatch]:
        file, first = self._file(name), 0
        columns = self.columns(file.schema_arrow, name)
        for group in range(file.metadata.num_row_groups):
            rows = file.metadata.row_group(group).num_rows
            if first <= start < first + rows:
                batches = file.iter_batches(BATCH_ROWS, row_groups=[group], columns=columns)
                yield from between(batches, start - first, stop - first)
            first += rows

    def _file(self, name: str) -> pq.ParquetFile:
        return pq.ParquetFile(self.files.open(name))


@source("arrow", endings=(".arrow",))
class Arrow(Tables):
    """An arrow stream, as `Dataset.save_to_disk` of Hugging Face's `datasets` leaves it, is one part."""

    def schema(self, name: str) -> pa.Schema:
        with self.files.open(name) as file, pa.ipc.open_stream(file) as reader:
            return reader.schema

    def parts(self, name: str) -> Sequence[int]:
        if not self.files.is_local:
            return [END]
        with pa.memory_map(self.files.path_of(name)) as file, pa.ipc.open_stream(file) as reader:
            return [sum(len(batch) for batch in reader)]

    def batches(self, name: str, start: int, stop: int) -> Iterator[pa.RecordBatch]:
        with self.files.open(name) as file, pa.ipc.open_stream(file) as reader:
            columns = self.columns(reader.schema, name)
            yield from between((batch.select(columns) for batch in reader), start, stop)


def between(batches: Iterable[pa.RecordBatch], start: int, stop: int) -> Iterator[pa.RecordBatch]:
    """Rows start : stop of batches that follow each other, at most BATCH_ROWS at a time."""
    first = 0
    for batch in batches:
        if first >= stop:
            return
        part = batch.slice(max(0, start - first), max(0, stop - max(start, first)))
        first += len(batch)
        yield from (part.slice(row, BATCH_ROWS) for row in range(0, len(part), BATCH_ROWS))


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
    """Whether values of a type are bytes, or structs with `bytes`."""
    if pa.types.is_struct(kind):
        place = kind.get_field_index("bytes")
        return place >= 0 and may_hold_images(kind.field(place).type)
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind))


def examples_of(name: str, image: Any, fields: dict[str, Any]) -> Iterator[Example | Skipped]:
    content = image.get("bytes") if isinstance(image, dict) else image
    if content is None:
        yield Skipped(name, "", "no image bytes")
        return
    note = from_fields(fields)
    example = Example(name, content, note.captions, note.label)
    yield example
    yield from (Skipped(name, example.digest().hex(), warning) for warning in note.warnings)
