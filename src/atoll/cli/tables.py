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
    """The configurations, the real-data baselines, and the ensemble compared with the monolith."""
    from ..evaluation.scores import other_numbers

    arms, floors, count = evaluation["arms"], evaluation["floors"], evaluation["plan"]["count"]
    rows = [(arm["name"], arm, {**arm["intervals"], "frechet": arm["frechet_interval"]}) for arm in arms]
    halves = {
        "recognised": floors["recogniser_accuracy"],
        "frechet": floors["frechet_half_against_half"],
        "nearest_median": floors["nearest_leave_one_out_median"],
    }
    whole = {"frechet": floors["frechet_count_against_all"]}
    names = [name for name in halves if any(arm[name] is not None for arm in arms)]
    real: Any = [("real, halves", halves, {}), (f"real, {count:,} of all", whole, {})]
    print_scores("Quality", names, [*rows, *real])
    rows = [(arm["name"], arm["scores"], arm["intervals"]) for arm in arms]
    print_scores("Other scores", other_numbers(arms), [*rows, ("real, halves", floors["scores"], {})])
    for name, other in evaluation["extractors"].items():
        found = [arm["extractors"][name] for arm in arms]
        rows = [(arm["name"], by | by["scores"], by["intervals"]) for arm, by in zip(arms, found, strict=True)]
        halves = {"frechet": other["floors"]["frechet_half_against_half"], **other["floors"]["scores"]}
        columns = ["frechet", *other_numbers(found)]
        print_scores(f"By the features of {name}", columns, [*rows, ("real, halves", halves, {})])
    chance, directions = floors.get("chance"), evaluation.get("frechet_directions")
    by_chance = "" if chance is None else f"chance: {chance:.1%}. "
    among = "" if directions is None else f" in the {directions} directions they vary most in"
    print_line(
        f"{by_chance}frechet: distance to the real images{among}. nearest: median distance to the nearest training "
        "image (real: to the nearest other one). \u00b1: 95 % interval."
    )
    for guidance, row in (evaluation["against_monolith"] or {}).items():
        print_line(
            f"{guidance}: Frechet of the ensemble ({row['route']}) {row['ensemble']:.1f}, of the monolith "
            f"{row['monolith']:.1f}, ratio {row['ratio']:.2f}"
        )


def print_scores(title: str, names: Sequence[str], rows: Sequence[tuple[str, Mapping[str, Any], Any]]) -> None:
    """Each row has a name, numbers and their intervals."""
    from ..evaluation.scores import number_title, number_written

    cells = [(row, *(number_written(n, numbers.get(n), ends.get(n)) for n in names)) for row, numbers, ends in rows]
    headings = [f">{number_title(name).replace(' ', '_')}" for name in names]
    print_table(" ".join(["configuration", *headings]), cells, title)
