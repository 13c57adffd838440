"""Tars read from front to back, past whatever is damaged in them.

Python's tarfile takes a damaged header, a tar that was cut off and the end of the first of two joined tars alike: it
stops, and says nothing. Here every byte up to the end of the file is a member, part of an end mark (blocks of
zeros) or listed as damage; after damage reading goes on with the next block that is a header. A header carries a
checksum, so pixels are not taken for one.
"""

from __future__ import annotations

import bz2
import gzip
import lzma
import tarfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO, cast

from .sample import LARGEST_FILE

BLOCK = tarfile.BLOCKSIZE
LARGEST_NAME = 2**20  # bytes; a header that asks for a longer name is damaged
SKIP_BYTES = 2**20  # at a time

# headers that say more about the member that follows
EXTRAS = (tarfile.GNUTYPE_LONGNAME, tarfile.XHDTYPE, tarfile.SOLARIS_XHDTYPE)
# headers that may stand between those and the member, and tell us nothing
BETWEEN = (tarfile.GNUTYPE_LONGLINK, tarfile.XGLTYPE)
NO_CONTENT = {
    tarfile.LNKTYPE: "hard link",
    tarfile.SYMTYPE: "symbolic link",
    tarfile.CHRTYPE: "device",
    tarfile.BLKTYPE: "device",
    tarfile.FIFOTYPE: "pipe",
}


@dataclass(frozen=True)
class Member:
    """One file. `content` is None where it was not read; `trouble` says why, as (reason, detail)."""

    name: str
    content: bytes | None
    trouble: tuple[str, str] = ("", "")


@dataclass(frozen=True)
class Damage:
    """Bytes of the tar that could not be read as one, in words that depend on its content alone."""

    detail: str


@dataclass(frozen=True)
class EndMark:
    """A tar ends here. Another one may follow, whose names mean other things."""


def read_tar(file: BinaryIO) -> Iterator[Member | Damage | EndMark]:
    """The members of a tar, or of several one after another, plain or compressed; and what is damaged."""
    reader = _Reader(decompressed(file))
    try:
        yield from reader.members()
    except (EOFError, OSError, zlib.error, lzma.LZMAError) as error:  # of the compression: the file itself is read
        yield Damage(f"compressed data broken after byte {reader.position} ({type(error).__name__})")


def decompressed(file: BinaryIO) -> BinaryIO:
    """The stream inside, whichever compression its first bytes tell of."""
    start = file.read(10)
    file.seek(0)
    if start.startswith(b"\x1f\x8b\x08"):
        return cast(BinaryIO, gzip.GzipFile(fileobj=file))
    if start.startswith(b"BZh") and start.endswith(b"1AY&SY"):  # a tar may begin with any name
        return cast(BinaryIO, bz2.BZ2File(file))
    if start.startswith(b"\xfd7zXZ\0"):
        return cast(BinaryIO, lzma.LZMAFile(file))
    return file


class _CutOff(Exception):
    """The file ends inside a member."""


class _Reader:
    def __init__(self, stream: BinaryIO) -> None:
        self.stream = stream
        self.position = 0  # in the tar, after decompression

    def members(self) -> Iterator[Member | Damage | EndMark]:
        ended = False  # the last block was zeros
        damaged: int | None = None  # where the blocks began that are no headers
        said: dict[str, str] = {}  # what extra headers say about the member that follows
        while block := self._read(BLOCK):
            start = self.position - len(block)
            if block.count(0) == len(block):
                if damaged is not None:
                    yield Damage(f"bytes {damaged} to {start} are no tar")
                    damaged = None
                if not ended:
                    yield EndMark()
                ended, said = True, {}
                continue
            ended = False
            header = header_of(block)
            if header is None:
                damaged, said = start if damaged is None else damaged, {}
                continue
            if damaged is not None:
                yield Damage(f"bytes {damaged} to {start} are no tar")
                damaged = None
            try:
                if header.type in EXTRAS:
                    said |= extra_header(header, self._take(header.size))
                elif header.type in BETWEEN:
                    self._skip(header.size)
                else:
                    yield from self._member(header, said)
                    said = {}
            except ValueError:
                yield Damage(f"bytes {start} to {self.position} are no tar")
                said = {}
            except _CutOff:
                yield Damage(f"cut off at byte {self.position}, inside the member at byte {start}")
                return
        if damaged is not None:
            yield Damage(f"bytes {damaged} to {self.position} are no tar")
        elif not ended:
            # nothing tells a writer that leaves the end mark out from a tar that was cut between two members
            yield Damage(f"no end mark at byte {self.position}; members after it may be missing")

    def _member(self, header: tarfile.TarInfo, said: dict[str, str]) -> Iterator[Member]:
        name = said.get("path", header.name)
        size = int(said.get("size", header.size))
        sparse = header.type == tarfile.GNUTYPE_SPARSE or any(key.startswith("GNU.sparse.") for key in said)
        if header.type in NO_CONTENT:
            yield Member(name, None, ("not a file", NO_CONTENT[header.type]))
        elif header.isdir():
            return
        elif not header.isreg() or sparse:
            self._skip(size)
            yield Member(name, None, ("not a file", "sparse" if sparse else "of unknown kind"))
        elif size > LARGEST_FILE:
            self._skip(size)
            yield Member(name, None, ("file too large", f"{size} bytes"))
        else:
            yield Member(name, self._take(size))

    def _take(self, size: int) -> bytes:
        content = self._read(size + -size % BLOCK)
        if len(content) < size:
            raise _CutOff
        return content[:size]

    def _skip(self, size: int) -> None:
        left = size + -size % BLOCK
        while left > 0:
            part = len(self._read(min(left, SKIP_BYTES)))
            left -= part
            if part == 0:
                raise _CutOff

    def _read(self, size: int) -> bytes:
        """`size` bytes, fewer at the end of the file only."""
        content = self.stream.read(size)
        self.position += len(content)
        return content


def header_of(block: bytes) -> tarfile.TarInfo | None:
    """The header in a block; None if it is damaged or no header at all."""
    try:
        header = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
    except (tarfile.HeaderError, ValueError):
        return None
    too_long = header.type in EXTRAS and header.size > LARGEST_NAME
    return None if header.size < 0 or too_long else header


def extra_header(header: tarfile.TarInfo, content: bytes) -> dict[str, str]:
    """`path`, `size` and holes of the member that follows: GNU's long name, or records "LENGTH KEY=VALUE" of pax.

    ValueError if it is damaged: no checksum covers it.
    """
    if header.type == tarfile.GNUTYPE_LONGNAME:
        return {"path": content.rstrip(b"\0").decode("utf-8", "surrogateescape")}
    said = {}
    while content:
        length, _, _ = content[:20].partition(b" ")
        end = int(length)
        if not 0 < end <= len(content):
            raise ValueError(f"a record of {end} bytes in {len(content)}")
        key, _, value = content[len(length) + 1 : end - 1].partition(b"=")
        if key == b"size" and not 0 <= int(value[:20]) < 2**63:
            raise ValueError("impossible size")
        if key in (b"path", b"size") or key.startswith(b"GNU.sparse."):
            said[key.decode()] = value.decode("utf-8", "surrogateescape")
        content = content[end:]
    return said
