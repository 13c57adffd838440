"""A folder of images, captions beside them.

    a/cat.jpg  a/cat.txt            one caption per line
               a/cat.json           {"caption": "...", "label": 3}; captions may be a list
    metadata.jsonl                  {"file_name": "a/cat.jpg", "text": "..."} per line, relative to the .jsonl

Every file that is neither a caption nor of another format is taken for an image, whatever its ending; decoding
decides. With labels="folder" the first folder below the root is the class.
"""

from __future__ import annotations

import json
import os
import posixpath
from collections.abc import Iterator

from ...artifacts import sanitize
from ..captions import Annotation, from_fields, from_json, from_text
from .files import NO_FILE
from .source import SOURCES, Example, Item, Items, Skipped, Source, source

LARGEST_FILE = 512 * 2**20  # bytes; nothing that large is one image
TEXTS = {".txt": from_text, ".json": from_json}
RECORDS = ".jsonl"
IMAGES = (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".avif", ".ppm", ".jp2")


@source("folder", endings=IMAGES)
class Folder(Source):
    """Images in a folder and the folders below it."""

    options = ("labels",)

    @property
    def classes(self) -> tuple[str, ...] | None:
        if self.config.labels == "given":
            return None
        images = [name for name in self.files.sizes if ending_of(name) not in (*TEXTS, RECORDS)]
        folders = tuple(sorted({name.partition("/")[0] if "/" in name else "" for name in images}))
        if self.config.labels == "auto" and ("" in folders or len(folders) < 2 or not self.files.is_folder):
            return None
        return tuple(name for name in folders if name)

    def list(self) -> Items:
        listed, beside = self.files.sizes, self.files.below
        recorded, items = self._records()
        classes = {name: number for number, name in enumerate(self.classes or ())}
        texts: dict[str, list[str]] = {}
        for name in beside:
            if ending_of(name) in TEXTS:
                texts.setdefault(os.path.splitext(name)[0], []).append(name)
        lonely = {name for names in texts.values() for name in names}
        others = {ending for cls in SOURCES.values() if cls is not Folder for ending in cls.endings}
        for name, size in listed.items():
            ending = ending_of(name)
            if size == NO_FILE:
                items.append(Item(name, skipped="not a file"))
            elif ending in others:
                items.append(Item(name, size, skipped="not an image"))
            elif size > LARGEST_FILE:
                items.append(Item(name, size, skipped="file too large"))
            elif ending not in (*TEXTS, RECORDS):
                its = tuple(texts.get(os.path.splitext(name)[0], ()))
                lonely.difference_update(its)
                note = recorded.pop(name, Annotation()) + Annotation(label=classes.get(name.partition("/")[0]))
                size += sum(beside[text] for text in its)
                items.append(Item(name, size, texts=its, note=note))
        if self.files.is_folder:  # a pattern chooses images
            items += [Item(name, skipped="caption without image") for name in [*lonely, *recorded]]
        return sorted(items, key=lambda item: item.name)

    def _records(self) -> tuple[dict[str, Annotation], Items]:
        """What the .jsonl files record, by image, the nearest file first; and the lines that are no records."""
        notes, bad = dict[str, Annotation](), Items()
        lists = [name for name in self.files.below if ending_of(name) == RECORDS]
        for name in sorted(lists, key=lambda name: (-name.count("/"), name)):
            try:
                lines = self.files.read(name).split(b"\n")
            except OSError:
                bad.append(Item(name, skipped="unreadable"))
                continue
            for number, line in enumerate(lines, 1):
                try:
                    fields = json.loads(line.strip() or b"null")
                    if fields is not None:
                        target = posixpath.normpath(posixpath.join(posixpath.dirname(name), str(fields["file_name"])))
                        notes[target] = notes.get(target, Annotation()) + from_fields(fields)
                except (ValueError, KeyError, TypeError, RecursionError):
                    bad.append(Item(f"{name}:{number}", skipped="bad caption: not a record with file_name"))
        return notes, bad

    def read(self, item: Item) -> Iterator[Example | Skipped]:
        name = sanitize(item.name)
        if item.skipped:
            yield Skipped(name, item.skipped)
            return
        try:
            content = self.files.read(item.name)
        except OSError as error:
            yield Skipped(name, "unreadable", type(error).__name__)
            return
        note = Annotation()
        for text in item.texts:
            try:
                note += TEXTS[ending_of(text)](self.files.read(text))
            except OSError:
                note += Annotation(warnings=("bad caption: unreadable",))
        yield Example(name, content, note + item.note)


def ending_of(name: str) -> str:
    return os.path.splitext(name)[1].lower()
