"""WebDataset tars, as img2dataset writes them: 000012.jpg, 000012.txt, 000012.json follow each other."""

from __future__ import annotations

import tarfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

from ..captions import Said, from_json, from_label, from_text
from .files import files_of, filesystem, fingerprint
from .sample import ColourImages, Reject, Sample, Unit

TEXTS = {"txt": from_text, "text": from_text, "caption": from_text, "json": from_json, "cls": from_label}
LARGEST_MEMBER = 512 * 2**20  # bytes; nothing that large is one image


@dataclass(frozen=True)
class WebDataset(ColourImages):
    place: str

    @property
    def classes(self) -> None:
        return None

    def units(self) -> list[Unit]:
        return [Unit(fingerprint([one_file(path)]), (path,)) for path in files_of(self.place, ".tar")]

    def read(self, unit: Unit) -> Iterator[Sample | Reject]:
        (path,) = unit.items
        system, inner = filesystem(path)
        name = PurePosixPath(path).name
        group = Group(name, "")
        with system.open(inner, "rb") as file:
            try:
                with tarfile.open(fileobj=file, mode="r|*") as tar:
                    for member in tar:
                        if not member.isfile():
                            continue
                        if member.size > LARGEST_MEMBER:
                            yield Reject(f"{name}/{member.name}", "", "file too large", f"{member.size} bytes")
                            continue
                        stem, _, ending = PurePosixPath(member.name).name.partition(".")
                        key = f"{PurePosixPath(member.name).parent}/{stem}"
                        if key != group.key:
                            yield from group.samples()
                            group = Group(name, key)
                        content = tar.extractfile(member)
                        group.members.append((ending.lower(), content.read() if content is not None else b""))
            except (tarfile.TarError, EOFError, OSError, zlib.error) as error:
                yield Reject(name, "", "broken tar", type(error).__name__)
        yield from group.samples()


@dataclass
class Group:
    """Members of a tar that share a key: one image (or several), and what is said about it."""

    tar: str
    key: str
    members: list[tuple[str, bytes]] = field(default_factory=list)

    def samples(self) -> Iterator[Sample | Reject]:
        said = Said()
        images = []
        for ending, content in self.members:
            if ending in TEXTS:
                said += TEXTS[ending](content)
            else:
                images.append((ending, content))
        shown = f"{self.tar}/{self.key.removeprefix('./')}"
        if self.members and not images:
            yield Reject(shown, "", "caption without image")
        for ending, content in images:
            sample = Sample(f"{shown}.{ending}", content, said.captions, said.label)
            yield sample
            yield from (Reject(sample.name, sample.identity().hex(), trouble) for trouble in said.troubles)


def one_file(path: str) -> tuple[str, dict[str, Any]]:
    system, inner = filesystem(path)
    return path, system.info(inner)
