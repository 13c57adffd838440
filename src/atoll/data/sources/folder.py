"""A folder of images, captions beside them.

    a/cat.jpg  a/cat.txt            one caption per line
               a/cat.json           {"caption": "...", "label": 3}; captions may be a list
    metadata.jsonl                  {"file_name": "a/cat.jpg", "text": "..."} per line, for files at or below it

Every file that is not a caption is taken for an image until decoding says otherwise, whatever its name ends
with. With labels="folder" the first folder below the root is the class.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import PurePosixPath
from typing import Any, Literal

import fsspec

from ..captions import Said, from_fields, from_json, from_text
from .files import filesystem, fingerprint, resolved, walk
from .sample import ColourImages, Reject, Sample, Unit

UNIT_FILES = 2048  # a worker's share of a large folder
TEXTS = {".txt": from_text, ".json": from_json}
RECORDS = ".jsonl"

# what is said by file name, and (where, what) of the lines that are no good
Records = tuple[dict[str, Said], list[tuple[str, str]]]


@dataclass(frozen=True)
class Folder(ColourImages):
    place: str
    labels: Literal["given", "folder"] = "given"

    @cached_property
    def classes(self) -> tuple[str, ...] | None:
        if self.labels == "given":
            return None
        system, root = filesystem(self.place)
        entries = (e for e in map(resolved, system.ls(root, detail=True)) if e["type"] == "directory")
        names = (PurePosixPath(e["name"]).name for e in entries)
        return tuple(sorted(name for name in names if not name.startswith(".")))

    def units(self) -> list[Unit]:
        system, root = filesystem(self.place)
        units = []
        for folder, files in walk(system, root):
            images = list(images_among(files))
            by_stem = defaultdict(list)
            for name, info in files.items():
                by_stem[stem(name)].append((name, info))
            # a folder of captions only still has to be read: its captions belong to nothing, and are listed
            for start in range(0, max(len(images), 1 if files else 0), UNIT_FILES):
                stop = min(start + UNIT_FILES, len(images))
                here = images[start:stop] if images else list(files)
                key = fingerprint([(folder, {}), *(entry for name in here for entry in by_stem[stem(name)])])
                units.append(Unit(key, (folder.removeprefix(root),), start, stop))
        return units

    def read(self, unit: Unit) -> Iterator[Sample | Reject]:
        system, root = filesystem(self.place)
        folder = root + unit.items[0]
        files = next(walk(system, folder))[1]
        images = list(images_among(files))
        texts = defaultdict(list)
        for name in files:
            if PurePosixPath(name).suffix.lower() in TEXTS:
                texts[stem(name)].append(name)
        records = {above: records_of(system, above) for above in folders_above(root, folder)}
        if unit.start == 0:
            yield from self._left_over(system, root, folder, images, texts, records[folder])
        for name in images[unit.start : unit.stop]:
            path = f"{folder}/{name}"
            shown = path.removeprefix(root).lstrip("/")
            if files[name]["type"] != "file":
                yield Reject(shown, "", "not a file", str(files[name]["type"]))
                continue
            try:
                content = system.cat_file(path)
                said = self._said(system, path, texts.get(stem(name), []))
            except OSError as error:
                yield Reject(shown, "", "unreadable", type(error).__name__)
                continue
            for above, (written, _) in records.items():
                said += written.get(path.removeprefix(above).lstrip("/"), Said())
            if self.classes is not None and "/" in shown:
                said += Said(label=self.classes.index(shown.split("/")[0]))
            sample = Sample(shown, content, said.captions, said.label)
            yield sample
            yield from (Reject(shown, sample.identity().hex(), trouble) for trouble in said.troubles)

    def _said(self, system: fsspec.AbstractFileSystem, path: str, texts: list[str]) -> Said:
        """What the files beside an image say about it."""
        said = Said()
        for text in texts:
            read = TEXTS[PurePosixPath(text).suffix.lower()]
            said += read(system.cat_file(f"{path.rpartition('/')[0]}/{text}"))
        return said

    def _left_over(
        self,
        system: fsspec.AbstractFileSystem,
        root: str,
        folder: str,
        images: list[str],
        texts: dict[str, list[str]],
        records: Records,
    ) -> Iterator[Reject]:
        """Captions that belong to no image, and lines of a .jsonl that say nothing."""
        where = folder.removeprefix(root).lstrip("/")
        stems = {stem(name) for name in images}
        for text in sorted(name for key, names in texts.items() if key not in stems for name in names):
            yield Reject(f"{where}/{text}".lstrip("/"), "", "caption without image")
        for line, trouble in records[1]:
            yield Reject(f"{where}/{line}".lstrip("/"), "", trouble)
        for name in sorted(records[0]):
            if not system.exists(f"{folder}/{name}"):
                yield Reject(f"{where}/{name}".lstrip("/"), "", "caption without image")


def stem(name: str) -> str:
    return PurePosixPath(name).stem


def images_among(files: dict[str, Any]) -> Iterator[str]:
    return (name for name in files if PurePosixPath(name).suffix.lower() not in (*TEXTS, RECORDS))


def folders_above(root: str, folder: str) -> Iterator[str]:
    """The folder itself and those above it, up to the root."""
    while True:
        yield folder
        if folder == root:
            return
        folder = folder.rpartition("/")[0]


def records_of(system: fsspec.AbstractFileSystem, folder: str) -> Records:
    """What the .jsonl files of a folder say, by file name relative to it; and the lines that are no good."""
    said: dict[str, Said] = {}
    troubles: list[tuple[str, str]] = []
    for entry in sorted(system.ls(folder, detail=True), key=lambda e: str(e["name"])):
        name = PurePosixPath(entry["name"]).name
        if entry["type"] != "file" or not name.endswith(RECORDS) or name.startswith("."):
            continue
        for number, line in enumerate(system.cat_file(f"{folder}/{name}").splitlines(), 1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
                target = record["file_name"]
            except (ValueError, KeyError, TypeError, RecursionError):
                troubles.append((f"{name}:{number}", "bad caption: not a record with file_name"))
                continue
            said[str(target)] = said.get(str(target), Said()) + from_fields(record)
    return said, troubles
