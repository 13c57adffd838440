"""Files of a source, on a disk or anywhere fsspec reaches, in one order and with a fingerprint."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

from ...artifacts import UserError


def filesystem(place: str) -> tuple[fsspec.AbstractFileSystem, str]:
    """The file system of a path or URL, and the path there."""
    try:
        system, path = fsspec.core.url_to_fs(place)
    except (ValueError, ImportError) as error:
        raise UserError(f"source {place}: cannot be opened ({error})") from error
    return system, path.rstrip("/") or "/"


def walk(system: fsspec.AbstractFileSystem, root: str) -> Iterator[tuple[str, dict[str, dict[str, Any]]]]:
    """(folder, {name: info}) for every folder below `root`, both sorted; hidden ones are left out.

    What is neither file nor folder (a broken link, a pipe) is among the files, with its type. Links to folders are
    followed, but none is entered twice.
    """
    waiting, seen = [root], set[str]()
    while waiting:
        folder = waiting.pop()
        place = os.path.realpath(folder) if isinstance(system, LocalFileSystem) else folder
        if place in seen:
            continue
        seen.add(place)
        try:
            entries = {PurePosixPath(e["name"]).name: e for e in system.ls(folder, detail=True)}
        except OSError as error:
            raise UserError(
                f"source {folder}: cannot be listed ({type(error).__name__}); check its permissions"
            ) from error
        entries = {name: resolved(entries[name]) for name in sorted(entries) if not name.startswith(".")}
        yield folder, {name: info for name, info in entries.items() if info["type"] != "directory"}
        folders = [f"{folder}/{name}" for name, info in entries.items() if info["type"] == "directory"]
        waiting += reversed(folders)


def resolved(info: dict[str, Any]) -> dict[str, Any]:
    """A link is what it leads to; fsspec calls every link `other`."""
    if not info.get("islink"):
        return info
    path = Path(info["name"])
    kind = "directory" if path.is_dir() else "file" if path.is_file() else "broken link"
    return {**info, "type": kind}


def files_of(place: str, ending: str) -> list[str]:
    """The files a user means: one file, a pattern such as data/*.tar, or all of that ending below a folder."""
    system, path = filesystem(place)
    if system.isfile(path):
        found = [path]
    elif any(mark in path for mark in "*?["):
        found = [str(p) for p in system.glob(path)]
    else:
        found = [f"{folder}/{name}" for folder, files in walk(system, path) for name in files if name.endswith(ending)]
    if not found:
        raise UserError(f"source {place}: no {ending} files there; check the path")
    return sorted(system.unstrip_protocol(p) if "://" in place else p for p in found)


def fingerprint(entries: Iterable[tuple[str, dict[str, Any]]]) -> str:
    """Changes when a file is added, taken away, renamed or rewritten."""
    digest = hashlib.sha256()
    for name, info in entries:
        changed = next((info[key] for key in ("mtime", "ETag", "LastModified", "etag") if key in info), None)
        digest.update(f"{name}\x1f{info.get('size')}\x1f{changed}\x1e".encode())
    return digest.hexdigest()
