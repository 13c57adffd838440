"""What every record says about its making, and records as CSV: one row per configuration."""

from __future__ import annotations

import csv
import os
import platform
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
MADE_BY = ("commit", "command", "seed", "hardware", "harness")  # the last columns of every row
LONGEST_LIST = 12  # numbers that are kept in one cell; a longer list is a curve, and is not kept
LONGEST_TEXT = 80


def commit() -> str:
    """Of this tree, short, and whether `src` is still that; a machine without its history is told by ATOLL_COMMIT."""
    if told := os.environ.get("ATOLL_COMMIT"):
        return told
    head = git("rev-parse", "--short", "HEAD")
    return (head or "unknown") + (" with changes" if git("status", "--porcelain", "--", "src") else "")


def git(*words: str) -> str:
    """What it prints; nothing where there is no history."""
    command = ["git", "-C", str(ROOT), *words]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def made_now() -> dict[str, str]:
    """The last columns of what this process measures."""
    script = Path(sys.argv[0]).name
    return {
        "commit": commit(),
        "command": " ".join([f"python benchmarks/{script}", *sys.argv[1:]]),
        "hardware": f"{os.cpu_count()} CPU cores, {platform.machine()}",
        "harness": f"benchmarks/{script}",
    }


def scores_of(evaluation: dict[str, Any], *names: str) -> list[dict[str, Any]]:
    """Name and values of some scores of every configuration, by the data's own features."""
    own = evaluation["features"][0]
    return [
        {"name": row["name"]} | {name: row["scores"][own].get(name, {"value": None})["value"] for name in names}
        for row in evaluation["configurations"]
    ]


def write_record(path: Path, record: Any, made: Mapping[str, Any] | None = None) -> None:
    """A nested record as CSV: table, configuration, every metric that some row has, and how it was made."""
    made = made_now() if made is None else made
    rows = [{**made, **row} for row in rows_of(record, path.stem)]
    metrics = dict.fromkeys(name for row in rows for name in row)
    columns = ["table", "configuration", *(n for n in metrics if n not in ("table", "configuration", *MADE_BY))]
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [*columns, *MADE_BY], restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def rows_of(node: Any, table: str, path: tuple[str, ...] = (), seed: Any = "") -> Iterator[dict[str, Any]]:
    """A row for every table of a nested record that has numbers; small tables of numbers in it are its columns."""
    if isinstance(node, list):
        for number, part in enumerate(node):
            named = isinstance(part, dict) and {"name", "configuration", "what", "command", "job"} & part.keys()
            yield from rows_of(part, table, path if named else (*path, str(number)), seed)
    if not isinstance(node, dict):
        return
    seed = node.get("seed", seed)
    row: dict[str, Any] = {}
    below: dict[str, Any] = {}
    tables = [frozenset(value) for value in node.values() if isinstance(value, Mapping)]
    for name, value in node.items():
        if (found := written(value)) is not None:
            row[name] = found
        elif isinstance(value, Mapping) and tables.count(frozenset(value)) == 1 and len(value) <= LONGEST_LIST:
            numbers = {f"{name} {part}": written(number) for part, number in value.items()}
            row |= {part: number for part, number in numbers.items() if number is not None}
            below |= {name: {part: v for part, v in value.items() if written(v) is None}}
        elif isinstance(value, Mapping | list):
            below[name] = value  # configurations that are measured alike, or many
    if any(name not in MADE_BY for name in row):
        yield {"table": table, "configuration": " / ".join(path), "seed": seed, **row}
    for name, value in below.items():
        yield from rows_of(value, table, (*path, str(name)), seed)


def written(value: Any) -> str | None:
    """A number, a short text or a short list of numbers as a cell; None of anything else."""
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, bool | int):
        return str(value)
    if isinstance(value, str):
        return value if len(value) <= LONGEST_TEXT else None
    if isinstance(value, list) and len(value) <= LONGEST_LIST and all(isinstance(one, int | float) for one in value):
        return " ".join(f"{one:.6g}" for one in value)
    return None
