"""A folder of images, captions beside them.

    a/cat.jpg  a/cat.txt            one caption per line
               a/cat.json           {"caption": "...", "label": 3}; captions may be a list
    metadata.jsonl                  {"file_name": "a/cat.jpg", "text": "..."} per line, relative to the .jsonl

Every file that is neither a caption nor of another format is taken for an image, whatever its ending; decoding
decides. With labels="folder" the first folder below the root is the class.
"""

from __future__ import annotations

import json
import posixpath
from collections.abc import Iterator
from functools import cached_property

from ...artifacts import sanitize
from ..captions import Annotation, from_fields, from_json, from_text
from .files import size_of, split_ending
from .source import SOURCES, Example, Item, Items, Skipped, Source, source

LARGEST_FILE = 512 * 2**20  # bytes; nothing that large is one image
TEXTS = {".txt": from_text, ".json": from_json}
RECORDS = ".jsonl"
IMAGES = (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".avif", ".ppm", ".jp2")


@source("folder", endings=IMAGES)
class Folder(Source):
    """Images in a folder and the folders below it."""

    options = ("labels",)

    @cached_property
    def classes(self) -> tuple[str, ...] | None:
        return self._top_folders if self.config.labels == "folder" else None

    @property
    def class_folders(self) -> tuple[str, ...]:
        inside = {name.partition("/")[0] if "/" in name else "" for name in self.files.stamps if is_image(name)}
        return tuple(sorted(inside)) if self.files.is_folder and "" not in inside and len(inside) > 1 else ()

    @property
    def _top_folders(self) -> tuple[str, ...]:
        return tuple(sorted({name.partition("/")[0] for name in self.files.stamps if "/" in name}))

    def list(self) -> Items:
        listed, beside = self.files.stamps, self.files.siblings
        recorded, items = self._records()
        classes = {name: number for number, name in enumerate(self.classes or ())}
        texts: dict[str, list[str]] = {}
        for name in beside:
            if split_ending(name)[1] in TEXTS:
                texts.setdefault(split_ending(name)[0], []).append(name)
        others = {ending for cls in SOURCES.values() if cls is not Folder for ending in cls.endings}
        with_image = set[str]()
        for name, stamp in listed.items():
            stem, ending = split_ending(name)
            if ending in others:
                items.append(Item(name, stamp, skipped=("not an image", f"a {ending} file")))
            elif size_of(stamp) > LARGEST_FILE:
                items.append(Item(name, stamp, skipped=("file too large", f"{size_of(stamp)} bytes")))
            elif is_image(name):
                with_image.add(stem)
                its_texts = tuple(texts.get(stem, ()))
                note = recorded.pop(name, Annotation()) + Annotation(label=classes.get(name.partition("/")[0]))
                stamps = "|".join([stamp, *(beside[text] for text in its_texts)])
                items.append(Item(name, stamps, texts=its_texts, annotation=note))
        lonely = [name for stem, names in texts.items() if stem not in with_image for name in names if name in listed]
        if self.files.is_folder:
            lonely += recorded
        items += [Item(name, skipped=("caption without image", "")) for name in lonely]
        items += [Item(name, skipped=("not a file", what)) for name, what in self.files.listing[1].items()]
        return sorted(items, key=lambda item: item.name)

    def _records(self) -> tuple[dict[str, Annotation], Items]:
        """What the .jsonl files record, by image, the nearest file first; and the lines that are no records."""
        notes: dict[str, Annotation] = {}
        bad: Items = []
        lists = [name for name in self.files.siblings if name.lower().endswith(RECORDS)]
        for name in sorted(lists, key=lambda name: (-name.count("/"), name)):
            try:
                lines = self.files.read(name).split(b"\n")
            except OSError as error:
                bad.append(Item(name, skipped=("unreadable", type(error).__name__)))
                continue
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                try:
                    fields = json.loads(line)
                    target = posixpath.normpath(posixpath.join(posixpath.dirname(name), str(fields["file_name"])))
                except (ValueError, KeyError, TypeError, RecursionError):
                    bad.append(Item(f"{name}:{number}", skipped=("bad caption: not a record with file_name", "")))
                    continue
                notes[target] = notes.get(target, Annotation()) + from_fields(fields)
        return notes, bad

    def read(self, item: Item) -> Iterator[Example | Skipped]:
        name = sanitize(item.name)
        if item.skipped is not None:
            yield Skipped(name, "", *item.skipped)
            return
        try:
            content = self.files.read(item.name)
        except OSError as error:
            yield Skipped(name, "", "unreadable", type(error).__name__)
            return
        note = sum((self._beside(text) for text in item.texts), Annotation()) + item.annotation
        example = Example(name, content, note.captions, note.label)
        yield example
        yield from (Skipped(name, example.digest().hex(), warning) for warning in note.warnings)

    def _beside(self, text: str) -> Annotation:
        """What a caption file beside an image records about it."""
        try:
            return TEXTS[split_ending(text)[1]](self.files.read(text))
        except OSError:
            return Annotation(warnings=("bad caption: unreadable",))


def is_image(name: str) -> bool:
    """Whether a file is taken for an image: it holds no captions."""
    return split_ending(name)[1] not in (*TEXTS, RECORDS)
