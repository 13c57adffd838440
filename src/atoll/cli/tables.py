"""Everything that is printed: lines and tables. Text of others never reaches the terminal as more than text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..artifacts import sanitize

console = Console()
Cell = str | int | Text
MOST = 400  # characters of a cell


def print_line(text: str) -> None:
    """Print text as it is; a line in a log is never broken."""
    console.print(sanitize(text, 2000), markup=False, highlight=False, soft_wrap=not console.is_terminal)


def print_table(headings: str, rows: Iterable[Sequence[Cell]], title: str | None = None) -> None:
    """Headings are parted by spaces, with _ for a space of their own.

    A column of numbers begins with `>`: it stands on the right. One that begins with `|`, too, is never broken.
    """
    if title is not None:  # rich would break it to the width of the table
        console.print(Text(sanitize(title), "bold"), soft_wrap=True)
    table = Table(header_style="bold", box=None, padding=(0, 2, 0, 0))
    for heading in headings.split():
        whole, right = heading[0] in ">|", heading[0] == ">"
        name = heading.lstrip(">|").replace("_", " ")
        table.add_column(name, justify="right" if right else "left", no_wrap=whole, overflow="fold")
    for row in rows:
        table.add_row(*(cell if isinstance(cell, Text) else Text(sanitize(str(cell), MOST)) for cell in row))
    console.print(table)


def print_evaluation(evaluation: Mapping[str, Any]) -> None:
    """The configurations and the real-data baseline by each extractor, and the ensemble compared with the monolith."""
    from ..evaluation.scores import FIRST, SCORES, score_table

    rows, real = evaluation["configurations"], evaluation["real"]
    names = [*(row["name"] for row in rows), "real images"]
    for extractor in evaluation["features"]:
        found = [*(row["scores"][extractor] for row in rows), real[extractor]]
        rest = [name for name in SCORES if name not in FIRST]
        tables = score_table(found, FIRST), score_table(found, rest, intervals=False)
        for (titles, cells), title in zip(tables, (f"By the features of {extractor}", None), strict=True):
            headings = ["|configuration", *(f">{one.replace(' ', '_')}" for one in titles)]
            print_table(" ".join(headings), [(name, *cell) for name, cell in zip(names, cells, strict=True)], title)
    chance = evaluation["chance"]
    by_chance = "" if chance is None else f" Class accuracy by chance: {chance:.1%}."
    print_line(f"\u00b1: half of a 95 % interval.{by_chance} Real images: one half compared with the other.")
    for row in evaluation["against_monolith"]:
        print_line(
            f"guidance {row['guidance']:g}: FD of the ensemble ({row['route']}) {row['ensemble']:.4g}, of the monolith "
            f"{row['monolith']:.4g}, ratio {row['ratio']:.2f}"
        )
