"""Where artifacts live: a folder, an object store of fsspec, or a web server, which can only be read.

A `Store` is one folder or one key prefix. A PUT to an object store is atomic, as `atomic_file` is on a disk.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from errno import EINVAL
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, TypeVar

import fsspec

from . import web
from .digest import sha256_bytes
from .errors import UserError
from .files import atomic_file
from .manifest import check_relative, is_relative

# schemes whose client sends the condition "only if absent" with the bytes; all others look first and write then
CONDITIONAL = ("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "memory")
PAUSES = (0.5, 2.0)  # seconds before reading is tried again after a lost connection
CHUNK = 2**20

Result = TypeVar("Result")


@dataclass(frozen=True)
class Store:
    """One place. `url` is a local path or a URL such as `s3://bucket/run`."""

    url: str

    @staticmethod
    def at(place: str | Path | Store) -> Store:
        if isinstance(place, Store):
            return place
        scheme, colon, rest = str(place).partition("://")
        if not colon or scheme in ("file", "local"):
            return Store(str(Path(rest if colon else place).expanduser().absolute()))
        if scheme not in fsspec.available_protocols():
            raise UserError(f"{place}: unknown storage scheme {scheme}://; use a folder or a URL such as s3://bucket")
        return Store(str(place).rstrip("/"))

    def __str__(self) -> str:
        return self.url

    @property
    def scheme(self) -> str:
        """Such as s3; empty for a local folder."""
        return self.url.partition("://")[0] if "://" in self.url else ""

    @property
    def is_local(self) -> bool:
        return self.scheme == ""

    @property
    def path(self) -> Path:
        assert self.is_local, f"{self.url} is not a local folder"
        return Path(self.url)

    @property
    def name(self) -> str:
        return PurePosixPath(self.url).name

    @property
    def parent(self) -> Store:
        return Store(self.url.rpartition("/")[0] or "/")

    @property
    def successor(self) -> Store:
        """The place of the next one: data-2 after data, data-3 after data-2."""
        stem, dash, number = self.name.rpartition("-")
        name = f"{stem}-{int(number) + 1}" if dash and number.isdecimal() else f"{self.name}-2"
        return self.parent.child(name)

    def child(self, *parts: str) -> Store:
        return Store("/".join([self.url.rstrip("/"), *map(check_relative, parts)]))

    def exists(self, name: str = "") -> bool:
        filesystem, path = self._at(name)
        return bool(filesystem.exists(path))

    def children(self) -> list[str]:
        """Names directly below that a file of an artifact may have, sorted; empty where nothing is."""
        filesystem, path = self._at()
        try:
            names = {PurePosixPath(entry).name for entry in filesystem.ls(path, detail=False)}
        except (FileNotFoundError, NotADirectoryError):
            return []
        return sorted(name for name in names if is_relative(name))

    def modified(self, name: str) -> datetime | None:
        """When a file was last written by the store's own clock, in UTC; None where the store has none."""
        filesystem, path = self._at(name)
        try:
            return filesystem.modified(path).astimezone(UTC)  # type: ignore[no-any-return]
        except NotImplementedError:
            return None

    def remove(self, name: str) -> None:
        """Remove a file; FileNotFoundError where it is missing."""
        filesystem, path = self._at(name)
        filesystem.rm_file(path)

    @contextmanager
    def opened(self, name: str, most: int | None = None) -> Iterator[BinaryIO]:
        """A file to be read in parts, of which a web server may send `most` bytes."""
        if self.scheme in web.SCHEMES:
            with web.get(f"{self.url}/{check_relative(name)}", most) as stream:
                yield stream
            return
        filesystem, path = self._at(name)
        if self.is_local and Path(path).exists() and not Path(path).is_file():  # a pipe may never have any bytes
            raise OSError(EINVAL, "not a regular file", path)
        with filesystem.open(path, "rb") as stream:
            yield stream

    def read(self, name: str, most: int | None = None) -> bytes:
        """The whole of a small file; of one larger than `most` bytes, the first `most` + 1."""

        def attempt() -> bytes:
            with self.opened(name, None if most is None else most + 1) as stream:
                return stream.read() if most is None else stream.read(most + 1)

        return retried(attempt)

    def download(self, name: str, sha256: str, most: int | None = None) -> Path:
        """A verified local copy of a remote file of at most `most` bytes, fetched once and named by its digest."""
        kept = cache_folder() / sha256[:2] / sha256
        if not kept.exists():
            retried(lambda: self._fetch(name, kept, sha256, most))
        return kept

    def _fetch(self, name: str, target: Path, sha256: str, most: int | None) -> None:
        digest, seen = hashlib.sha256(), 0
        with atomic_file(target) as stream, self.opened(name, most) as source:
            while part := source.read(CHUNK):
                digest.update(part)
                seen += len(part)
                if most is not None and seen > most:
                    raise UserError(f"{self.url}/{name}: larger than the {most:,} bytes expected; ask its owner")
                stream.write(part)
            if (found := digest.hexdigest()) != sha256:
                raise UserError(f"{self.url}/{name}: sha256 is {found[:12]}, expected {sha256[:12]}; get it again")

    def write(self, name: str, data: bytes, *, create: bool = False) -> None:
        """Write one small file in one step: a reader sees the old bytes or the new ones, never a part.

        With `create`, FileExistsError if there is one.
        """
        filesystem, path = self._at(name)
        if self.is_local:
            with atomic_file(Path(path), create=create) as target:
                target.write(data)
        else:
            filesystem.pipe_file(path, data, mode="create" if create else "overwrite")

    def upload(self, source: Path, name: str) -> None:
        """Copy one local file to this place in one step."""
        filesystem, path = self._at(name)
        if self.is_local:
            with source.open("rb") as original, atomic_file(Path(path)) as copy:
                shutil.copyfileobj(original, copy)
        else:
            filesystem.put_file(str(source), path)

    def create(self, name: str, data: bytes) -> bool:
        """Write a small file unless its name is taken, or being taken: then False, and nothing is changed.

        Of several that create the same name at once at most one gets True.
        """
        self.check_creates()
        try:
            self.write(name, data, create=True)
        except FileExistsError:
            return False
        except OSError as error:
            answer: Any = getattr(error.__cause__, "response", {})  # of S3, as s3fs keeps it
            if answer.get("Error", {}).get("Code") not in ("PreconditionFailed", "ConditionalRequestConflict"):
                raise
            return False
        return True

    def check_creates(self) -> None:
        """Refuse, before any work is done, a store on which `create` cannot keep its promise."""
        if self.scheme and self.scheme not in CONDITIONAL:
            raise UserError(
                f"{self.url}: {self.scheme}:// cannot create a file only if it is absent, so two organizers at once "
                "would undo each other; use a folder, or S3, Google Cloud or Azure storage"
            )

    def _at(self, name: str = "") -> tuple[fsspec.AbstractFileSystem, str]:
        """The file system and the path in it of a file below this place, or of the place itself."""
        place = f"{self.url}/{check_relative(name)}" if name else self.url
        if self.is_local:
            return fsspec.filesystem("file"), place
        if self.scheme in web.SCHEMES:
            raise UserError(f"{self.url}: a web server can only be read, file by file; use a folder, or s3:// and such")
        filesystem, path = fsspec.core.url_to_fs(place)
        filesystem.invalidate_cache(path)  # others write here too, so no listing is kept
        return filesystem, path


def retried(read: Callable[[], Result]) -> Result:
    """The result of reading, tried again after a lost connection."""
    for pause in PAUSES:
        try:
            return read()
        except (ConnectionError, TimeoutError):
            time.sleep(pause)
    return read()


def cache_folder() -> Path:
    """Local copies of remote files: $ATOLL_CACHE, else the user's cache folder."""
    usual = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "atoll"
    return Path(os.environ.get("ATOLL_CACHE") or usual)


def working_folder(place: Store) -> Path:
    """Where work on a remote place is done on this machine: for this user alone, and for no other place."""
    private = cache_folder() / "work"
    private.mkdir(mode=0o700, parents=True, exist_ok=True)
    private.chmod(0o700)
    return private / sha256_bytes(place.url.encode())[:32]
