"""Samples that come late: a new data artifact on top of an old one.

The old shards are taken over as they are (linked, where the disk allows it) and the new samples follow in shards of
their own, encoded with the old settings, normalized with the old statistics and worded in the old vocabulary. So
latents and text stay in the space that experts were trained in, and whoever holds the old shards fetches only the new.
Classes stay too: a late label that is none of them is listed, and its sample kept without it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow.parquet as pq

from ..artifacts import Artifact, FileEntry, Store, UserError, link
from .space import LatentConfig, TextConfig


@dataclass(frozen=True)
class Predecessor:
    """The data artifact that is added to."""

    artifact: Artifact

    @staticmethod
    def open(place: str | Path | Store) -> Predecessor:
        return Predecessor(Artifact.open(place, "data"))

    @property
    def latent(self) -> LatentConfig:
        return LatentConfig.model_validate(self.artifact.config["latent"])

    @property
    def text(self) -> TextConfig | None:
        text = self.artifact.config["text"]
        return None if text is None else TextConfig.model_validate(text)

    @property
    def labels(self) -> int:
        """How many labels there are: a network's table has no row for others."""
        return int(self.artifact.config["labels"] or 0)

    @property
    def classes(self) -> list[str] | None:
        """Names of the labels, where the first source knew them."""
        names = self.artifact.config["source"]["classes"]
        return None if names is None else list(names)

    @property
    def unlabelled(self) -> int:
        """How many of the old samples have no label."""
        return int(pq.read_table(self.index, columns=["label"])["label"].null_count)

    @property
    def shards(self) -> list[str]:
        return self.artifact.names("shards/")

    @property
    def index(self) -> Path:
        return self.artifact.file("index.parquet")

    def check_fits(self, channels: int, classes: tuple[str, ...] | None, source: str) -> None:
        """Refuse a source whose images or labels mean something else."""
        config = self.artifact.config
        if channels != config["channels"]:
            raise UserError(
                f"{source}: has images of {channels} channels, {self.artifact.store} of {config['channels']}"
            )
        if classes is not None and self.classes is None:
            raise UserError(f"{source}: {self.artifact.store} has no named classes; leave out --labels folder")
        if classes is not None and list(classes) != self.classes:
            raise UserError(f"{source}: its classes are not those of {self.artifact.store}; use the same folder names")

    def take_over(self, folder: Path) -> dict[str, FileEntry]:
        """Bring the old shards into `folder`, each checked; their digests."""
        for name in self.shards:
            link(self.artifact.file(name), folder / name)
        return {name: self.artifact.manifest.files[name] for name in self.shards}


def known_ids(index: Path, ids: Sequence[bytes]) -> set[bytes]:
    """Which of these sorted ids an index holds already; reads the part of the index they can be in."""
    if not ids:
        return set()
    between = [("id", ">=", ids[0].hex()), ("id", "<=", ids[-1].hex())]
    found = pq.read_table(index, columns=["id"], filters=between)["id"].to_pylist()
    return set(ids) & {bytes.fromhex(identity) for identity in found}
