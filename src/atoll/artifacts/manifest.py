"""A manifest makes a folder an artifact: what it is, what it was made from, and the digest of every file."""

from __future__ import annotations

import json
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from .digest import canonical_json, sha256_bytes
from .errors import UserError

NAME = "manifest.json"
STATE = "state"  # of half-done work, in the folder of what it is to become
SCHEMA_VERSION = 1
MOST_BYTES = 256 * 2**20  # a million files

# Never listed, so that equal work has equal digests: when, where and how fast it was done.
UNLISTED = frozenset({NAME, "provenance.json", "log.jsonl", STATE})


class FileEntry(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    bytes: int = Field(ge=0)


class Manifest(BaseModel):
    """The content of manifest.json. Holds no time, host, path, rate or pid."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    schema_version: int = SCHEMA_VERSION
    kind: str
    config: dict[str, Any] = {}
    parents: dict[str, str] = {}
    files: dict[str, FileEntry] = {}
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
            manifest = Manifest.model_validate_json(data)
        except ValidationError as error:
            raise UserError(f"{where}: not a valid manifest ({explain(error)}); make the artifact again") from error
        if manifest.schema_version != SCHEMA_VERSION:
            raise UserError(
                f"{where}: schema version {manifest.schema_version}, this atoll reads {SCHEMA_VERSION}; "
                "use the atoll that wrote it, or make it again"
            )
        return manifest


def explain(error: ValidationError) -> str:
    """The first complaint of a pydantic error in one line: `budget.images: should be greater than 0 (got -1)`."""
    complaints = complaints_of(error)
    first = complaints[0]
    where = sanitize(".".join(map(str, first["loc"]))) or "file"
    shown = repr(first.get("input"))
    value = f" (got {shown if len(shown) <= 60 else shown[:57] + '...'})" if first["type"] != "missing" else ""
    more = f"; and {len(complaints) - 1} more" if len(complaints) > 1 else ""
    # pydantic begins with a capital; the rest may quote what the user wrote, and stays as it is
    message = first["msg"].removeprefix("Value error, ")
    return f"{where}: {sanitize(message[:1].lower() + message[1:])}{value}{more}"


def complaints_of(error: ValidationError) -> list[dict[str, Any]]:
    """What pydantic complains of, as if it knew that `name` tells which of several things a table is meant to be.

    It says of each of them what keeps the table from being it, under the name of its class; of use to a user is only
    what is wrong with the one that was named.
    """
    complaints: list[dict[str, Any]] = [dict(one) for one in error.errors(include_url=False)]
    misnamed = [c for c in complaints if c["type"] == "literal_error" and is_of_a_class(c["loc"], -2)]
    for table in dict.fromkeys(c["loc"][:-2] for c in misnamed):
        at = len(table)
        below = [c for c in complaints if c["loc"][:at] == table and is_of_a_class(c["loc"], at)]
        others = {c["loc"][at]: c["ctx"]["expected"] for c in misnamed if c["loc"][:-2] == table}
        meant = [c | {"loc": (*table, *c["loc"][at + 1 :])} for c in below if c["loc"][at] not in others]
        if not meant:
            choices = f"input should be {' or '.join(others.values())}"
            meant = [misnamed[0] | {"loc": (*table, "name"), "msg": choices}]
        place = complaints.index(below[0])
        complaints = [*complaints[:place], *meant, *(c for c in complaints[place:] if c not in below)]
    return complaints


def is_of_a_class(place: tuple[int | str, ...], at: int) -> bool:
    """Whether a part of the place of a complaint is the name of a class; those of fields begin with a small letter."""
    return -len(place) <= at < len(place) and str(place[at])[:1].isupper()


def sanitize(text: str, most: int = 300) -> str:
    """A stranger's text for a line on a terminal: nothing that moves a cursor or ends the line, and not endless."""
    return "".join(c if c.isprintable() else "?" for c in (text if len(text) <= most else f"{text[: most - 3]}..."))
