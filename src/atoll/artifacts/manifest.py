"""A manifest makes a folder an artifact: its kind, what it was made from, and the digest of every file."""

from __future__ import annotations

import json
from pathlib import PurePosixPath
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from .digest import canonical_json, sha256_bytes
from .errors import UserError, sanitize
from .files import STATE

MANIFEST = "manifest.json"
DIGEST = r"^[0-9a-f]{64}$"
# never listed, so that equal work has equal digests: when, where and how fast it was done
UNLISTED = frozenset({MANIFEST, "provenance.json", "log.jsonl", STATE})


def is_relative(name: str) -> bool:
    """Whether a file name stays inside its folder on every system."""
    pure = PurePosixPath(name)
    return bool(name) and not pure.is_absolute() and ".." not in pure.parts and not set(name) & set("\\\0:")


def check_relative(name: str, kind: type[Exception] = UserError) -> str:
    if not is_relative(name):
        raise kind(f"unsafe file name {name!r}: it must be relative and stay inside its folder")
    return name


RelativePath = Annotated[str, AfterValidator(lambda name: check_relative(name, ValueError))]


class FileEntry(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)
    sha256: str = Field(pattern=DIGEST)
    bytes: int = Field(ge=0)


class Manifest(BaseModel):
    """The content of manifest.json. Holds no time, host, path, rate or pid."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    schema_version: Literal[2] = 2
    kind: str
    config: dict[str, Any] = {}
    parents: dict[str, str] = {}
    files: dict[RelativePath, FileEntry] = {}
    license: str | None = None

    def digest(self) -> str:
        """The artifact's identity: sha256 of the manifest in canonical JSON."""
        return sha256_bytes(canonical_json(self.model_dump(mode="json")))

    def to_bytes(self) -> bytes:
        text = json.dumps(self.model_dump(mode="json"), sort_keys=True, indent=2, ensure_ascii=False)
        return text.encode() + b"\n"

    @staticmethod
    def parse(data: bytes, where: str) -> Manifest:
        try:
            return Manifest.model_validate_json(data)
        except ValidationError as error:
            raise UserError(f"{where}: not a valid manifest ({explain(error)}); make the artifact again") from error


class Reference(BaseModel):
    """An artifact of the same run: `path` is relative to the run, `digest` is what must lie there."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    path: RelativePath = Field(max_length=400)
    digest: str = Field(pattern=DIGEST)

    @property
    def name(self) -> str:
        """The name of its folder, such as 03-1f2e3d4c5b6a."""
        return self.path.rpartition("/")[2]


def explain(error: ValidationError) -> str:
    """The first error of pydantic in one line: `budget.images: should be greater than 0 (got -1); and 2 more`."""
    first = error.errors(include_url=False)[0]
    where = sanitize(".".join(map(str, first["loc"]))) or "file"
    shown = repr(first["input"])
    value = f" (got {shown if len(shown) <= 60 else shown[:57] + '...'})" if first["type"] != "missing" else ""
    more = f"; and {error.error_count() - 1} more" if error.error_count() > 1 else ""
    message = first["msg"].removeprefix("Value error, ")
    return f"{where}: {sanitize(message[:1].lower() + message[1:])}{value}{more}"
