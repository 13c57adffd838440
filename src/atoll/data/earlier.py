"""What an earlier command has left at --out: a finished artifact, half-done work, or neither.

Half-done work lies in the draft's state/ with a record of what it is, work.json: how the source was read, and how it
was encoded. Nothing without that record is trusted.
"""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..artifacts import (
    LOCK,
    STATE,
    Artifact,
    ArtifactWriter,
    Store,
    UserError,
    canonical_json,
    differences,
    find,
    load_if_same,
    sha256_bytes,
    write_atomic,
)
from .units import Unit

KIND = "data"


def chosen_before(out: str | Path | Store, draft: ArtifactWriter) -> str | None:
    """The features of the artifact at `out`, or of unfinished work there; None if there is neither."""
    there = find(out)
    if there is not None and there.manifest.kind == KIND:
        return str(there.config["request"]["features"])
    work = recorded_work(draft)
    return None if work is None else str(work["encoding"]["features"])


def recorded_work(draft: ArtifactWriter) -> dict[str, Any] | None:
    """What a killed run was doing in this folder; None if there is no record, or one that says too little."""
    record = draft.folder / STATE / "work.json"
    if not record.exists():
        return None
    work: dict[str, Any] = json.loads(record.read_bytes())
    return work if {"reading", "encoding"} <= work.keys() else None


def already_there(out: str | Path | Store, request: dict[str, Any], reading: dict[str, Any]) -> Artifact | None:
    """The artifact an earlier, equal command has made. Counts and statistics are results, not settings."""
    there = find(out)
    if there is None or there.manifest.kind != KIND:
        return load_if_same(out, KIND, request, {})  # None, or a line that says what is there
    before = logged_reading(there)
    if before is not None and not same_place(before["source"], reading["source"]):
        raise UserError(
            f"{there.store}: already holds the data of source {before['source']}, not {reading['source']}; "
            "choose another --out"
        )
    before = None if before is None else {**before, "source": reading["source"]}
    if before is not None and (changed := differences(before, {name: reading.get(name) for name in before})):
        raise UserError(
            f"{there.store}: already holds this source read in another way ({', '.join(changed)}); choose another --out"
        )
    return load_if_same(out, KIND, {**there.config, "request": request}, there.manifest.parents)


def same_place(one: str, other: str) -> bool:
    """Whether two sources are one, by names that differ only in where they begin."""
    return one == other or ("://" not in one + other and os.path.abspath(one) == os.path.abspath(other))


def logged_reading(data: Artifact) -> dict[str, Any] | None:
    """The source this artifact was made from, and how it was read. Unlisted, so it may be missing after a copy."""
    try:
        first = data.store.read("log.jsonl").splitlines()[0]
    except FileNotFoundError:
        return None
    reading: dict[str, Any] = json.loads(first)
    return reading


def digest_of(units: Sequence[Unit]) -> str:
    """A digest of what there is to read: another file, or the same one changed, is another source."""
    return sha256_bytes(canonical_json([unit.key for unit in units]))


def begin(draft: ArtifactWriter, reading: dict[str, Any], encoding: dict[str, Any]) -> None:
    """Keep of a killed run's work what is still right: all, what was read, or nothing.

    Other files, or the same read otherwise, are refused. What was read serves other settings of the second pass, so
    that a mistake in those costs one pass. A folder without a record says nothing about its files.
    """
    state = draft.folder / STATE
    work = {"reading": reading, "encoding": encoding}
    before = recorded_work(draft)
    if before is not None and not differences(before, work):
        return
    if before is None:
        draft.clear()
        state.mkdir()
    elif changed := differences(before["reading"], reading):
        raise UserError(
            f"{draft.folder}: holds unfinished work on another source or size ({', '.join(changed)}); "
            "use the old settings or remove that folder"
        )
    else:
        dropped = state / f"dropped-{uuid.uuid4().hex[:8]}"
        dropped.mkdir()
        for made in [state / "encoded", *(path for path in draft.folder.iterdir() if path.name not in (LOCK, STATE))]:
            if made.exists():  # moved aside first: half of a folder would pass for a whole one
                made.rename(dropped / made.name)
        shutil.rmtree(dropped)
    write_atomic(state / "work.json", canonical_json(work))
