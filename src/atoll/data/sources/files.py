"""Files of a source, on a disk or anywhere fsspec reaches, in one order and with a fingerprint."""

from __future__ import annotations

import glob
import hashlib
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import PurePosixPath
from typing import Any, NamedTuple

import fsspec
from fsspec.implementations.local import LocalFileSystem
from fsspec.utils import glob_translate

from ...artifacts import UserError
from .reading import attempt

WILDCARDS = re.compile(r"[*?[]")


class Entry(NamedTuple):
    """What a listing says about a file."""

    kind: str  # "file", or what it is instead
    stamp: str  # changes when the file is rewritten


def filesystem(place: str) -> tuple[fsspec.AbstractFileSystem, str]:
    """The file system of a path or URL, and the path there."""
    try:
        system, path = fsspec.core.url_to_fs(place)
    except (ValueError, ImportError) as error:
        raise UserError(f"source {place}: cannot be opened ({error})") from error
    return system, path.rstrip("/") or "/"


@dataclass(frozen=True)
class Selection:
    """The files a user means: all below `root`, or those whose path, or that of a folder above them, fits `pattern`."""

    system: fsspec.AbstractFileSystem
    root: str
    pattern: str | None = None

    @staticmethod
    def of(place: str) -> Selection:
        """A folder, one file, or a pattern such as data/*.tar."""
        system, path = filesystem(place)
        if attempt(lambda: system.isfile(path), system, path):
            return Selection(system, path.rpartition("/")[0], glob.escape(path))
        if attempt(lambda: system.isdir(path), system, path):
            return Selection(system, path)
        if (wildcard := WILDCARDS.search(path)) is None:
            raise UserError(
                f"source {place}: no such folder or file; use digits, a folder, tars, parquet or a URL of these"
            )
        return Selection(system, path[: wildcard.start()].rpartition("/")[0], path)

    def walk(self) -> Iterator[tuple[str, dict[str, Entry]]]:
        """(folder, {name: entry}) for every folder that may hold files of the selection, with all files in it."""
        return walk(self.system, self.root, self._may_hold)

    def holds(self, path: str) -> bool:
        """Whether a path below the root belongs to the selection."""
        if self.pattern is None:
            return True
        parts, depth = path.split("/"), len(self.pattern.split("/"))
        fits = translated(self.pattern)
        if "**" in self.pattern:
            return any(
                fits.match("/".join(parts[:end])) for end in range(len(self.root.split("/")) + 1, len(parts) + 1)
            )
        return fits.match("/".join(parts[:depth])) is not None

    def _may_hold(self, folder: str) -> bool:
        """Whether files of the selection may lie in a folder or below it."""
        if self.pattern is None or "**" in self.pattern:
            return True
        depth = len(folder.split("/"))
        start = "/".join(self.pattern.split("/")[:depth])
        return self.holds(folder) or translated(start).match(folder) is not None


@lru_cache(maxsize=64)
def translated(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(glob_translate(pattern))
    except (ValueError, re.error) as error:
        raise UserError(f"source {pattern}: not a pattern ({error})") from error


def walk(
    system: fsspec.AbstractFileSystem, root: str, enter: Callable[[str], bool] = lambda folder: True
) -> Iterator[tuple[str, dict[str, Entry]]]:
    """(folder, {name: entry}) for `root` and every folder below it, both sorted; hidden ones are left out.

    A folder comes before those in it. What is neither file nor folder (a broken link, a pipe) is among the files,
    with its kind. Links to folders are followed, but none is entered twice.
    """
    waiting, seen = [root], set[str]()
    while waiting:
        folder = waiting.pop()
        place = os.path.realpath(folder) if isinstance(system, LocalFileSystem) else folder
        if place in seen:
            continue
        seen.add(place)
        entries = listed(system, folder)
        yield folder, {name: entry for name, entry in entries.items() if entry.kind != "directory"}
        folders = [f"{folder}/{name}" for name, entry in entries.items() if entry.kind == "directory"]
        waiting += reversed([inner for inner in folders if enter(inner)])


def listed(system: fsspec.AbstractFileSystem, folder: str) -> dict[str, Entry]:
    """What lies in a folder, by name, sorted, without what is hidden."""
    read = local_entries if isinstance(system, LocalFileSystem) else remote_entries
    try:
        entries = attempt(lambda: dict(read(system, folder)), system, folder)
    except OSError as error:
        raise UserError(f"source {folder}: cannot be listed ({type(error).__name__}); check its permissions") from error
    return {name: entries[name] for name in sorted(entries) if not name.startswith(".")}


def local_entries(system: fsspec.AbstractFileSystem, folder: str) -> Iterator[tuple[str, Entry]]:
    """By the operating system: fsspec keeps 1.7 KB about each file. A link is what it leads to."""
    with os.scandir(folder) as entries:
        for entry in entries:
            try:
                found = entry.stat()
            except OSError:
                yield entry.name, Entry("broken link" if entry.is_symlink() else "file", "")
                continue
            kind = {stat.S_IFDIR: "directory", stat.S_IFREG: "file"}.get(stat.S_IFMT(found.st_mode), "other")
            yield entry.name, Entry(kind, stamp_of({"size": found.st_size, "mtime": found.st_mtime}))


def remote_entries(system: fsspec.AbstractFileSystem, folder: str) -> Iterator[tuple[str, Entry]]:
    for info in system.ls(folder, detail=True):
        yield PurePosixPath(info["name"]).name, Entry(info["type"], stamp_of(info))


def files_of(place: str, ending: str) -> list[str]:
    """The files of a source that is made of few large ones: those of that ending.

    One file is taken whatever its name, and so are those of a pattern none of which has the ending.
    """
    system, path = filesystem(place)
    if attempt(lambda: system.isfile(path), system, path):  # a web server has files, but no folders to list
        found = [path]
    else:
        chosen = Selection.of(place)
        below = [f"{folder}/{name}" for folder, files in chosen.walk() for name in files]
        named = [path for path in below if chosen.holds(path)]
        found = [path for path in named if path.endswith(ending)]
        if chosen.pattern is not None:
            found = found or named
    if not found:
        raise UserError(f"source {place}: no {ending} files there; check the path")
    return sorted(system.unstrip_protocol(path) if "://" in place else path for path in found)


def stamp_of(info: dict[str, Any]) -> str:
    changed = next((info[key] for key in ("mtime", "ETag", "LastModified", "etag") if key in info), None)
    return f"{info.get('size')}\x1f{changed}"


def file_fingerprint(path: str) -> str:
    system, inner = filesystem(path)
    return fingerprint([(path, stamp_of(attempt(lambda: system.info(inner), system, inner)))])


def fingerprint(entries: Iterable[tuple[str, str]]) -> str:
    """Changes when a file is added, taken away, renamed or rewritten. Entries are names and stamps."""
    digest = hashlib.sha256()
    for name, stamp in entries:
        digest.update(f"{name}\x1f{stamp}\x1e".encode("utf-8", "surrogatepass"))
    return digest.hexdigest()
