"""Sources of images: the built-in digits; folders, tars, parquet and Hugging Face data sets."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from ...artifacts import UserError
from .digits import Digits, is_digits
from .files import Selection
from .folder import Folder
from .sample import Reject, Sample, Source, Unit
from .tables import Tables
from .webdataset import WebDataset

__all__ = ["Reject", "Sample", "Source", "SourceConfig", "Unit", "is_digits", "open_source"]

Format = Literal["digits", "folder", "webdataset", "parquet", "arrow"]


class SourceConfig(BaseModel):
    """How to read a source."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    format: Format | None = Field(default=None, description="None: told by what lies there")
    labels: Literal["given", "folder"] = Field(default="given", description="folder: the first folder is the class")
    image_column: str | None = Field(default=None, description="of a table; None: the only one that can be it")


def open_source(place: str, config: SourceConfig = SourceConfig()) -> Source:
    """The source a user names: `digits`, a folder, a file, a pattern of files, or a URL of any of these."""
    kind = config.format or format_of(place)
    if config.labels == "folder" and kind != "folder":
        raise UserError(f"--labels folder: {place} is no image folder but {kind}; leave it out")
    if config.image_column is not None and kind not in ("parquet", "arrow"):
        raise UserError(f"--image-column {config.image_column}: {place} is no table but {kind}; leave it out")
    if kind == "digits":
        return Digits.at(place if is_digits(place) else "digits")
    if kind == "folder":
        return Folder(place, config.labels)
    if kind == "webdataset":
        return WebDataset(place)
    return Tables(place, ".parquet" if kind == "parquet" else ".arrow", config.image_column)


def format_of(place: str) -> Format:
    """What kind of source lies at a place. Tars come first: img2dataset writes a parquet file beside each."""
    if is_digits(place):
        return "digits"
    endings: dict[str, Format] = {".tar": "webdataset", ".parquet": "parquet", ".arrow": "arrow"}
    path = place.rstrip("/")
    for ending, kind in endings.items():
        if path.endswith(ending):
            return kind
    chosen = Selection.of(place)
    there = {
        PurePosixPath(name).suffix
        for folder, files in chosen.walk()
        for name in files
        if chosen.holds(f"{folder}/{name}")
    }
    if chosen.pattern is not None and not there:
        raise UserError(f"source {place}: no file fits this pattern; check it, and put it in quotes")
    return next((kind for ending, kind in endings.items() if ending in there), "folder")
