"""A folder of images, captions beside them.

    a/cat.jpg  a/cat.txt            one caption per line
               a/cat.json           {"caption": "...", "label": 3}; captions may be a list
    metadata.jsonl                  {"file_name": "a/cat.jpg", "text": "..."} per line, for files at or below it

Every file that is not a caption is taken for an image until decoding says otherwise, whatever its name ends
with. With labels="folder" the first folder below the root is the class.

The folder is listed once. A unit carries the names of its own files and the places of its own lines, so that
reading it costs the same in a folder of a thousand files and of a million.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Literal

import fsspec
from fsspec.implementations.local import LocalFileSystem

from ..captions import Said, from_json, from_text
from .files import Entry, Selection, filesystem, fingerprint, listed
from .reading import read_file
from .records import Lines, Records, read_lines
from .sample import LARGEST_FILE, ColorImages, Reject, Sample, Unit, sanitize

UNIT_FILES = 4096  # a worker's share of a large folder, captions counted
TEXTS = {".txt": from_text, ".json": from_json}
RECORDS = ".jsonl"


@dataclass(frozen=True)
class FolderUnit(Unit):
    """Files of one folder: `items` are their names, those that share a stem together."""

    root: str = ""
    folder: str = ""  # below the root: "" or "/a/b"
    lines: tuple[Lines, ...] = ()  # of .jsonl files, about these images or about none
    label: int | None = None
    refused: tuple[Reject, ...] = ()  # what the listing has shown to be of no use


@dataclass(frozen=True)
class Folder(ColorImages):
    place: str
    labels: Literal["given", "folder"] = "given"

    @cached_property
    def classes(self) -> tuple[str, ...] | None:
        if self.labels == "given":
            return None
        chosen = Selection.of(self.place)
        entries = listed(chosen.system, chosen.root)
        return tuple(name for name, entry in entries.items() if entry.kind == "directory")

    def units(self) -> list[Unit]:
        chosen = Selection.of(self.place)
        classes = {name: number for number, name in enumerate(self.classes or ())}
        units: list[Unit] = []
        above: list[tuple[Records, str]] = []  # of this folder and those it lies in, with their fingerprints
        for folder, files in chosen.walk():
            while above and not f"{folder}/".startswith(f"{above[-1][0].folder}/"):
                units += left_over(chosen, *above.pop())
            lists = [name for name, entry in files.items() if ending(name) == RECORDS and entry.kind == "file"]
            if lists:
                key = fingerprint((f"{folder}/{name}", files[name].stamp) for name in lists)
                above.append((Records(chosen.system, chosen.root, folder, lists), key))
            below = folder.removeprefix(chosen.root)
            for names in shares(chosen, folder, files):
                stamps = [(below, ""), *((name, files[name].stamp) for name in names), *(("", key) for _, key in above)]
                images = [f"{folder}/{name}" for name in names if is_image(name)]
                unit = FolderUnit(
                    key=fingerprint(stamps),
                    items=tuple(name for name in names if files[name].kind == "file"),
                    root=chosen.root,
                    folder=below,
                    # the nearest .jsonl first
                    lines=tuple(line for records, _ in reversed(above) for line in records.take(images)),
                    label=classes.get(below.lstrip("/").split("/")[0]),
                    refused=tuple(
                        Reject(shown(f"{below}/{name}"), "", "not a file", files[name].kind)
                        for name in names
                        if files[name].kind != "file"
                    ),
                )
                units.append(unit)
        while above:
            units += left_over(chosen, *above.pop())
        return units

    def read(self, unit: Unit) -> Iterator[Sample | Reject]:
        assert isinstance(unit, FolderUnit), "a unit of a folder"
        system, _ = filesystem(self.place)
        folder = unit.root + unit.folder
        yield from unit.refused
        recorded = read_lines(system, unit.lines)
        for _, names in groupby(unit.items, stem):
            together = list(names)
            images = [name for name in together if is_image(name)]
            texts = [name for name in together if not is_image(name)]
            if not images:
                yield from (Reject(shown(f"{unit.folder}/{text}"), "", "caption without image") for text in texts)
                continue
            beside = sum((said_in(system, folder, text) for text in texts), Said())
            for name in images:
                where = shown(f"{unit.folder}/{name}")
                said = beside + recorded.pop(f"{folder}/{name}", Said()) + Said(label=unit.label)
                path = f"{folder}/{name}"
                try:
                    if isinstance(system, LocalFileSystem) and (size := os.path.getsize(path)) > LARGEST_FILE:
                        yield Reject(where, "", "file too large", f"{size} bytes")
                        continue
                    content = read_file(system, path)
                except OSError as error:
                    yield Reject(where, "", "unreadable", type(error).__name__)
                    continue
                sample = Sample(where, content, said.captions, said.label)
                yield sample
                yield from (Reject(where, sample.identity().hex(), trouble) for trouble in said.troubles)
        for path in sorted(recorded):
            yield Reject(shown(path.removeprefix(unit.root)), "", "caption without image")


def shares(chosen: Selection, folder: str, files: dict[str, Entry]) -> Iterator[list[str]]:
    """The names of a folder's files cut into shares; files that share a stem stay together.

    Captions come with the image they belong to; on their own only if they were chosen themselves.
    """
    share: list[str] = []
    for _, names in groupby(sorted((name for name in files if ending(name) != RECORDS), key=stem), stem):
        together = list(names)
        held = [name for name in together if chosen.holds(f"{folder}/{name}")]
        if any(map(is_image, held)):
            held = [name for name in together if name in held or not is_image(name)]
        share += held
        if len(share) >= UNIT_FILES:
            yield share
            share = []
    # a .jsonl that is no file is listed like an image that is none
    share += [name for name, entry in files.items() if ending(name) == RECORDS and entry.kind != "file"]
    if share:
        yield share


def left_over(chosen: Selection, records: Records, key: str) -> Iterator[Unit]:
    """Units for the lines that say nothing, and for those about images that are not there."""
    below = records.folder.removeprefix(chosen.root)
    pieces = records.left_over(UNIT_FILES) if all(map(chosen.holds, records.paths)) else ()
    for number, lines in enumerate(pieces):
        key_here = fingerprint([(f"{below} lines {number}", key)])
        yield FolderUnit(key_here, (), root=chosen.root, folder=below, lines=tuple(lines))
    for start in range(0, len(records.refused), UNIT_FILES):
        key_here = fingerprint([(f"{below} refused {start}", key)])
        refused = tuple(records.refused[start : start + UNIT_FILES])
        yield FolderUnit(key_here, (), root=chosen.root, folder=below, refused=refused)


def said_in(system: fsspec.AbstractFileSystem, folder: str, name: str) -> Said:
    """What a file beside an image says about it."""
    try:
        content = read_file(system, f"{folder}/{name}")
    except OSError:
        return Said(troubles=("bad caption: unreadable",))
    return TEXTS[ending(name)](content)


def shown(below: str) -> str:
    """A path below the root, as people are told it."""
    return sanitize(below.lstrip("/"))


def stem(name: str) -> str:
    """As pathlib has it, at a tenth of its time: this is asked several times for each of a million files."""
    dot = name.rfind(".")
    return name[:dot] if 0 < dot < len(name) - 1 else name


def ending(name: str) -> str:
    return name[len(stem(name)) :].lower()


def is_image(name: str) -> bool:
    return ending(name) not in (*TEXTS, RECORDS)
