"""WebDataset tars, as img2dataset writes them: 000012.jpg, 000012.txt, 000012.json follow each other."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from ..captions import Said, from_json, from_label, from_text
from .files import file_fingerprint, files_of, filesystem
from .reading import open_file
from .sample import ColorImages, Reject, Sample, Unit, sanitize
from .tar import Damage, EndMark, read_tar

TEXTS = {"txt": from_text, "text": from_text, "caption": from_text, "json": from_json, "cls": from_label}


@dataclass(frozen=True)
class WebDataset(ColorImages):
    place: str

    @property
    def classes(self) -> None:
        return None

    def units(self) -> list[Unit]:
        return [Unit(file_fingerprint(path), (path,)) for path in files_of(self.place, ".tar")]

    def read(self, unit: Unit) -> Iterator[Sample | Reject]:
        (path,) = unit.items
        system, inner = filesystem(path)
        name = sanitize(PurePosixPath(path).name)
        try:
            file = open_file(system, inner)
        except OSError as error:
            yield Reject(name, "", "unreadable", type(error).__name__)
            return
        group = Group(name, "")
        with file:
            for found in read_tar(file):
                if isinstance(found, Damage):
                    yield Reject(name, "", "broken tar", found.detail)
                    continue
                if isinstance(found, EndMark):  # the next tar may use the same keys again
                    yield from group.samples()
                    group = Group(name, "")
                    continue
                if found.content is None:
                    yield Reject(f"{name}/{sanitize(found.name)}", "", *found.trouble)
                    continue
                stem, _, ending = PurePosixPath(found.name).name.partition(".")
                key = f"{PurePosixPath(found.name).parent}/{stem}"
                if key != group.key:
                    yield from group.samples()
                    group = Group(name, key)
                group.members.append((ending.lower(), found.content))
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
        shown = f"{self.tar}/{sanitize(self.key.removeprefix('./'))}"
        if self.members and not images:
            yield Reject(shown, "", "caption without image")
        for ending, content in images:
            sample = Sample(f"{shown}.{sanitize(ending)}", content, said.captions, said.label)
            yield sample
            yield from (Reject(sample.name, sample.identity().hex(), trouble) for trouble in said.troubles)
