"""Images in an SQLite file: `atoll prepare photos.sqlite --plugin examples/sqlite_source.py --out runs/photos/data`.

CREATE TABLE images (image BLOB, caption TEXT, label INTEGER)      -- image: JPEG, PNG, ... as encoded
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from atoll.data.sources import Annotation, Example, Item, Items, Skipped, Source, row_items, source

ROWS = "SELECT rowid, image, caption, label FROM images ORDER BY rowid LIMIT ? OFFSET ?"


@source("sqlite", endings=(".sqlite", ".db"))
class Sqlite(Source):
    """One file; an item is a range of rows."""

    def list(self) -> Items:
        """What there is to read, in a fixed order. Called once, in the main process."""
        with closing(sqlite3.connect(f"{Path(self.place).absolute().as_uri()}?mode=ro", uri=True)) as file:
            (count,) = file.execute("SELECT count(*) FROM images").fetchone()
        size = Path(self.place).stat().st_size  # shows a resumed run that the file has changed
        return row_items(Path(self.place).name, size, count)

    def read(self, item: Item) -> Iterator[Example | Skipped]:
        """The images of an item. Called in worker processes, for one item at a time."""
        assert item.stop is not None, "row_items sets it"
        with closing(sqlite3.connect(self.place)) as file:
            for row, image, caption, label in file.execute(ROWS, (item.stop - item.start, item.start)):
                name = f"{item.name}/{row}"
                if image is None:
                    yield Skipped(name, "no image bytes")
                else:
                    yield Example(name, image, Annotation((caption,) if caption else (), label))
