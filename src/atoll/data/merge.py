"""The rows of all units become the index: repeats are left out, captions and labels of an image are joined."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from .index import SCHEMA
from .sources import Skipped
from .space import TextConfig
from .text import Words


def merge(table: pa.Table, known: Sequence[str]) -> tuple[pa.Table, list[Skipped]]:
    """The rows of the index that the rows of units become, and what is skipped; `known` are the ids of older data.

    Of repeats the first in listing order stays. Captions of the others are joined to its own; labels that differ are
    dropped.
    """
    ids = np.array([*known, *table["id"].to_pylist()], dtype="S64")
    first = first_rows(ids)[len(known) :] - len(known)  # negative: a row of the older data
    names, captions = table["name"], table["captions"].to_pylist()
    labels = table["label"].fill_null(-1).to_numpy().copy()
    skipped = [Skipped(names[row].as_py(), "already in the data") for row in np.flatnonzero(first < 0).tolist()]
    conflicts = set[int]()
    for row in np.flatnonzero((first >= 0) & (first != np.arange(len(table)))).tolist():
        stays = int(first[row])
        captions[stays] = list(dict.fromkeys([*captions[stays], *captions[row]]))
        if labels[stays] < 0:
            labels[stays] = labels[row]
        elif 0 <= labels[row] != labels[stays]:
            conflicts.add(stays)
    for row in sorted(conflicts):
        labels[row] = -1
        skipped.append(Skipped(names[row].as_py(), "conflicting labels"))
    kept = np.flatnonzero(first == np.arange(len(table)))
    columns = {name: table[name].take(pa.array(kept)) for name in ("id", "shard", "row", "split")}
    columns["captions"] = [captions[row] for row in kept.tolist()]
    columns["label"] = pa.array(labels[kept], mask=labels[kept] < 0)
    return pa.table(columns).select(SCHEMA.names).cast(SCHEMA), skipped


def fit_to_older(table: pa.Table, text: TextConfig | None, labels: int) -> tuple[pa.Table, list[Skipped]]:
    """The same rows without captions and labels that no network of the older data has a row for."""
    words = Words(text) if text is not None and text.kind == "words" else None
    skipped, captions, numbers = list[Skipped](), list[list[str]](), list[int | None]()
    for row in table.select(["name", "captions", "label"]).to_pylist():
        captions.append([caption for caption in row["captions"] if words is None or words.knows(caption)])
        if len(captions[-1]) < len(row["captions"]):
            skipped.append(Skipped(row["name"], "bad caption: words no network knows"))
        numbers.append(row["label"] if row["label"] is not None and row["label"] < labels else None)
        if numbers[-1] != row["label"]:
            skipped.append(Skipped(row["name"], "unknown label"))
    for name, values in {"captions": captions, "label": numbers}.items():
        column = table.schema.get_field_index(name)
        table = table.set_column(column, name, pa.array(values, SCHEMA.field(name).type))
    return table, skipped


def first_rows(ids: np.ndarray) -> np.ndarray:
    """For each of the ids [N] the first row int64 [N] with the same id."""
    _, first, group = np.unique(ids, return_index=True, return_inverse=True)
    return np.asarray(first[group])
