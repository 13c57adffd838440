"""Where artifacts live: a folder, or any object store fsspec can reach.

A `Store` is one folder or one key prefix. Local writes are atomic and durable: temporary name, fsync, rename,
fsync the parent. On an object store a PUT is atomic already, and completeness is the manifest's business.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath
from typing import BinaryIO

import fsspec

from .create import check_creates, create_remote
from .digest import sha256_file
from .errors import UserError
from .leftovers import remove_unfinished
from .lock import file_lock, is_file_at, lock_file
from .web import SCHEMES, WebFiles

# what file systems without hard links answer
CANNOT_LINK = frozenset({errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EACCES})


@dataclass(frozen=True)
class Store:
    """One place. `url` is a local path or an fsspec URL such as `s3://bucket/run`."""

    url: str

    @staticmethod
    def at(place: str | Path | Store) -> Store:
        if isinstance(place, Store):
            return place
        text = str(place)
        if "://" not in text:
            return Store(str(Path(text).expanduser().absolute()))
        scheme, _, rest = text.partition("://")
        if scheme in ("file", "local"):
            return Store(str(Path(rest).absolute()))
        if scheme not in fsspec.available_protocols():
            raise UserError(f"{text}: unknown storage scheme {scheme}://; use a folder or an fsspec URL like s3://")
        return Store(text.rstrip("/"))

    def __str__(self) -> str:
        return self.url

    @property
    def is_local(self) -> bool:
        return "://" not in self.url

    @property
    def path(self) -> Path:
        assert self.is_local, f"{self.url} is not a local folder"
        return Path(self.url)

    @property
    def name(self) -> str:
        return PurePosixPath(self.url).name

    @property
    def parent(self) -> Store:
        return Store(str(self.path.parent)) if self.is_local else Store(self.url.rpartition("/")[0])

    @property
    def successor(self) -> Store:
        """Where a newer one of this goes: data-2 after data, data-3 after data-2."""
        stem, dash, number = self.name.rpartition("-")
        name = f"{stem}-{int(number) + 1}" if dash and number.isdecimal() else f"{self.name}-2"
        return self.parent.child(name)

    def child(self, *parts: str) -> Store:
        for part in parts:
            check_relative(part)
        return Store(str(self.path.joinpath(*parts))) if self.is_local else Store("/".join([self.url, *parts]))

    def exists(self, name: str = "") -> bool:
        if self.is_local:
            return (self.path / name).exists()
        filesystem, root = self._remote()
        place = f"{root}/{name}" if name else root
        filesystem.invalidate_cache(place)  # others write here, too: what was listed before may be old
        return bool(filesystem.exists(place))

    def children(self) -> list[str]:
        """Names directly below, sorted; empty where nothing is."""
        if self.is_local:
            return sorted(entry.name for entry in self.path.iterdir()) if self.path.is_dir() else []
        filesystem, root = self._remote()
        filesystem.invalidate_cache(root)
        try:
            return sorted({PurePosixPath(entry).name for entry in filesystem.ls(root, detail=False)})
        except FileNotFoundError:
            return []

    def read(self, name: str, most: int | None = None) -> bytes:
        """The whole of a small file, or of one larger than `most` bytes as many and one more.

        FileNotFoundError where it is missing; with `most`, nothing but a regular file is waited for.
        """
        check_relative(name)
        if self.is_local:
            return (self.path / name).read_bytes() if most is None else read_part(self.path / name, most + 1)
        filesystem, root = self._remote()
        try:
            return bytes(filesystem.cat_file(f"{root}/{name}", end=None if most is None else most + 1))
        except OSError as error:
            if most is not None and error.errno == errno.EINVAL and filesystem.size(f"{root}/{name}") == 0:
                return b""  # of an empty file there is no part to ask for
            raise

    def write(self, name: str, data: bytes) -> None:
        """Replace one small file in one step: a reader sees the old bytes or the new ones, never a part."""
        check_relative(name)
        if self.is_local:
            target = self.path / name
            target.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(target, data)
        else:
            filesystem, root = self._remote()
            filesystem.pipe_file(f"{root}/{name}", data)

    def create(self, name: str, data: bytes, *, asked: bool = True) -> bool:
        """Write one small file unless its name is taken: then False, and nothing is changed.

        Of several that create the same name at once exactly one gets True; a reader sees the whole file or none. A
        store that cannot do this is refused; without `asked` it is not asked, for those who may remove nothing from it
        and know from somebody else that it can.
        """
        check_relative(name)
        if self.is_local:
            return create_local(self.path / name, data)
        if asked:
            self.check_creates()
        filesystem, root = self._remote()
        return create_remote(filesystem, f"{root}/{name}", data)

    def check_creates(self) -> None:
        """Refuse, before any work is done, a store on which `create` cannot keep its word."""
        if not self.is_local:
            check_creates(*self._remote(), self.url)

    def modified(self, name: str) -> datetime | None:
        """When a file was last written by the store's own clock, in UTC; None where the store does not say."""
        check_relative(name)
        if self.is_local:
            return datetime.fromtimestamp((self.path / name).stat().st_mtime, UTC)
        filesystem, root = self._remote()
        try:
            when = filesystem.modified(f"{root}/{name}")
        except NotImplementedError:
            return None
        return when.astimezone(UTC) if isinstance(when, datetime) else None

    def upload(self, source: Path, name: str) -> None:
        """Copy one local file to an object store."""
        check_relative(name)
        filesystem, root = self._remote()
        filesystem.put_file(str(source), f"{root}/{name}")

    def download(self, name: str, sha256: str, most: int | None = None) -> Path:
        """A verified local copy of a remote file of at most `most` bytes, fetched once and named by its digest."""
        check_relative(name)
        kept = cache_folder() / sha256[:2] / sha256
        if kept.exists():
            return kept
        kept.parent.mkdir(parents=True, exist_ok=True)
        remove_unfinished(kept.parent)
        filesystem, root = self._remote()
        with atomic_file(kept) as stream:
            if isinstance(filesystem, WebFiles):
                filesystem.get_file(f"{root}/{name}", stream.name, most)
            else:
                size = filesystem.size(f"{root}/{name}") if most is not None else None
                if most is not None and (size or 0) > most:
                    raise UserError(f"{self.url}/{name}: has {size:,} bytes, at most {most:,} were expected")
                filesystem.get_file(f"{root}/{name}", stream.name)
            found = sha256_file(Path(stream.name))
            if found != sha256:
                raise UserError(f"{self.url}/{name}: sha256 is {found[:12]}, expected {sha256[:12]}; get it again")
        return kept

    def remove(self, name: str) -> None:
        """Take a file away; FileNotFoundError where it is missing."""
        check_relative(name)
        if self.is_local:
            (self.path / name).unlink()
        else:
            filesystem, root = self._remote()
            filesystem.rm_file(f"{root}/{name}")

    @contextmanager
    def opened(self, name: str) -> Iterator[BinaryIO]:
        """A file of an object store or a web server, to be read as far as the reader wants."""
        check_relative(name)
        filesystem, root = self._remote()
        with filesystem.open(f"{root}/{name}", "rb") as stream:
            yield stream

    def _remote(self) -> tuple[fsspec.AbstractFileSystem, str]:
        if self.url.partition("://")[0] in SCHEMES:
            return WebFiles(), self.url
        filesystem, root = fsspec.core.url_to_fs(self.url)
        return filesystem, root.rstrip("/")


def check_relative(name: str) -> None:
    """Refuse a file name that could leave its folder: manifests may come from strangers."""
    pure = PurePosixPath(name)
    if not name or pure.is_absolute() or ".." in pure.parts or "\\" in name or "\0" in name or ":" in name:
        raise UserError(f"unsafe file name {name!r} in a manifest: names must be relative and stay inside the folder")


def cache_folder() -> Path:
    """Local copies of remote shards: $ATOLL_CACHE, else the user's cache folder."""
    if chosen := os.environ.get("ATOLL_CACHE"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "atoll"


def read_part(path: Path, size: int) -> bytes:
    """The first bytes of a regular file. A pipe may never have any, a device may have no end: those are refused."""
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | getattr(os, "O_NONBLOCK", 0))) as stream:
        if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        return stream.read(size)


def fsync_path(path: Path) -> None:
    """Flush a file or folder to the disk, so that a rename after it survives a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        # folders of some network file systems refuse fsync; there is nothing more to do for them
        if error.errno not in (errno.EINVAL, errno.ENOTSUP) or not path.is_dir():
            raise
    finally:
        os.close(handle)


def write_atomic(target: Path, data: bytes) -> None:
    with atomic_file(target) as stream:
        stream.write(data)


@contextmanager
def atomic_file(target: Path) -> Iterator[BinaryIO]:
    """A file to write: under a temporary name, then flushed, renamed and its folder flushed. Whole, or not there.

    It is locked until it has its name, so that whoever cleans up tells it from one that a killed process left.
    """
    temporary, stream = open_temporary(target)
    try:
        with stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
            if sys.platform != "win32":
                os.replace(temporary, target)
        if sys.platform == "win32":  # no open file is renamed there
            os.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    fsync_path(target.parent)


def open_temporary(target: Path) -> tuple[Path, BinaryIO]:
    """A new, locked file beside `target`, with a name that leftovers.py knows."""
    while True:
        temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.tmp")
        stream = temporary.open("xb")
        with suppress(OSError):  # a file system without locks: nobody will take it for left behind there
            lock_file(stream.fileno(), wait=True)  # only somebody who cleans up can have it, for a moment
        if is_file_at(stream.fileno(), temporary):
            return temporary, stream
        stream.close()  # and has removed it


def create_local(target: Path, data: bytes) -> bool:
    """Put a whole and flushed file under this name, unless something has the name already: then False."""
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary, stream = open_temporary(target)
    try:
        with stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
            created = _named(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)
    if created:
        fsync_path(target.parent)
    return created


def _named(temporary: Path, target: Path) -> bool:
    try:
        os.link(temporary, target)
    except FileExistsError:
        # a network disk may have done it and lost the answer
        return temporary.stat().st_nlink > 1
    except OSError as error:
        if error.errno not in CANNOT_LINK:
            raise
        # no hard links here, so one at a time looks and renames; that holds among the processes of one machine
        with file_lock(target.parent, wait=True):
            if target.exists():
                return False
            os.replace(temporary, target)
    return True


def link(source: Path, target: Path) -> None:
    """The same file under another name, unless one is there; a copy where the file system cannot link."""
    if target.exists():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source, target)
    except OSError:
        with source.open("rb") as original, atomic_file(target) as copy:
            shutil.copyfileobj(original, copy)


def raise_if_disk_full(error: BaseException, place: str) -> None:
    """Turn "no space left" into one line the user can act on, whichever library met it."""
    full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    if full or os.strerror(errno.ENOSPC) in str(error):
        raise UserError(f"{place}: disk full while writing; free some space and run the same command again") from error
    if os.strerror(errno.EFBIG) in str(error):
        limits = "the file is too large for this disk or its limits (ulimit -f)"
        raise UserError(f"{place}: {limits}; lift them and run the same command again") from error
