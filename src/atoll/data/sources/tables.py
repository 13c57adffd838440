"""Tables with images in a column: parquet files, local or on the Hugging Face hub, and data sets saved to disk.

The image column holds encoded bytes, or the struct {bytes, path} of Hugging Face's data sets. A data set on the hub
is its parquet files: hf://datasets/owner/name.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from ...artifacts import UserError, sanitize
from ..captions import CAPTION_NAMES, LABEL_NAMES, from_fields
from .source import END, Example, Item, Items, Skipped, Source, row_items, source

BATCH_ROWS = 256  # rows in memory at a time


class Table(NamedTuple):
    """An opened file."""

    schema: pa.Schema
    groups: list[int]  # rows of each group that can be read on its own; [END] where counting them would read the file
    batches: Callable[[int, list[str]], Iterable[pa.RecordBatch]]  # of a group by its number: these columns


class Tables(Source):
    """Files of rows. Those of one source have one schema."""

    options = ("image_column",)

    @property
    def classes(self) -> tuple[str, ...] | None:
        """Names of the labels, where Hugging Face's `datasets` has left them in the schema."""
        metadata = self._table(self.files.ending_with(self.endings)[0]).schema.metadata or {}
        features = json.loads(metadata.get(b"huggingface", b"{}")).get("info", {}).get("features", {})
        names = next((features[n].get("names") for n in LABEL_NAMES if isinstance(features.get(n), dict)), None)
        return None if names is None else tuple(map(str, names))

    def list(self) -> Items:
        items = Items()
        for name in self.files.ending_with(self.endings):
            table, size, start = self._table(name), self.files.sizes[name], 0
            image_column(table.schema, self.config.image_column, self.place)
            for group, rows in enumerate(table.groups):
                items += [Item(name, size, 0, END)] if rows == END else row_items(name, size, rows, start, group)
                start += rows
        return items

    def read(self, item: Item) -> Iterator[Example | Skipped]:
        assert item.stop is not None, "rows of a table"
        table, name, row = self._table(item.name), sanitize(item.name), item.start
        image = image_column(table.schema, self.config.image_column, item.name)
        columns = [column for column in table.schema.names if column in (image, *CAPTION_NAMES, *LABEL_NAMES)]
        first = sum(table.groups[: item.offset])
        try:
            batches = table.batches(item.offset, columns)
            for batch in between(batches, item.start - first, item.stop - first):
                for fields in batch.to_pylist():
                    content = fields.pop(image)
                    content = content.get("bytes") if isinstance(content, dict) else content
                    if content is None:
                        yield Skipped(f"{name}[{row}]", "no image bytes")
                    else:
                        yield Example(f"{name}[{row}]", content, from_fields(fields))
                    row += 1
        except (pa.ArrowException, OSError) as error:  # pyarrow's on damaged bytes; a failing read is a UserError
            yield Skipped(f"{name}[{row}]", "broken table", type(error).__name__)

    def _table(self, name: str) -> Table:
        try:
            return self._open(name)
        except (pa.ArrowException, OSError) as error:
            where = self.files.path_of(name)
            raise UserError(f"source {where}: not a readable {self.format} file; get it again") from error

    def _open(self, name: str) -> Table:
        raise NotImplementedError


@source("parquet", endings=(".parquet",))
class Parquet(Tables):
    """Parquet files, by row groups."""

    def _open(self, name: str) -> Table:
        file = pq.ParquetFile(self.files.open(name))
        rows = [file.metadata.row_group(group).num_rows for group in range(file.metadata.num_row_groups)]
        read = partial(file.iter_batches, BATCH_ROWS)
        return Table(file.schema_arrow, rows, lambda group, columns: read(row_groups=[group], columns=columns))


@source("arrow", endings=(".arrow",))
class Arrow(Tables):
    """Arrow streams, as `Dataset.save_to_disk` of Hugging Face's `datasets` leaves them; each is one group."""

    def _open(self, name: str) -> Table:
        stream, rows = pa.ipc.open_stream(self.files.open(name)), END
        if self.files.is_local:
            rows = sum(len(batch) for batch in pa.ipc.open_stream(pa.memory_map(self.files.path_of(name))))
        return Table(stream.schema, [rows], lambda _, columns: (batch.select(columns) for batch in stream))


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
    """The column with the images: the chosen one, or the only one that can hold them."""
    possible = [str(field.name) for field in schema if may_hold_images(field.type)]
    if chosen is None and len(possible) == 1:
        return possible[0]
    if chosen not in possible:
        option = "--image-column" if chosen is None else f"--image-column {chosen}"
        raise UserError(f"{option}: name one of the columns of {where} that can hold images: {', '.join(possible)}")
    return chosen


def may_hold_images(kind: pa.DataType) -> bool:
    """Whether values of a type are bytes, or structs with `bytes`."""
    if pa.types.is_struct(kind):
        place = kind.get_field_index("bytes")
        return place >= 0 and may_hold_images(kind.field(place).type)
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind))
