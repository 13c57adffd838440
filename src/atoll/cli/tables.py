"""Tables more than one verb prints."""

from __future__ import annotations

from typing import Any

from rich.markup import escape
from rich.table import Table

from ..artifacts import printable
from .bars import console


def plain(text: str, most: int = 120) -> str:
    """Text that may come from a stranger, for rich: no markup, no control characters, no end of line, not endless."""
    return escape(printable(text, most))


def print_evaluation(evaluation: dict[str, Any]) -> None:
    """The arms, the floors, and where the ensemble stands against the monolith."""
    table = Table(title="Quality", title_justify="left", header_style="bold")
    for column in ("model", "router", "route"):
        table.add_column(column)
    for column in ("guidance", "right", "Frechet", "nearest"):
        table.add_column(column, justify="right")
    for arm in evaluation["arms"]:
        router = "" if arm["model"] != "ensemble" else (arm["router"] or "own")
        recognised = "" if arm["recognised"] is None else f"{arm['recognised']:.1%}"
        table.add_row(
            arm["model"],
            router,
            arm["route"] or "",
            f"{arm['guidance']:g}",
            recognised,
            f"{arm['frechet']:.1f}",
            f"{arm['nearest_median']:.2f}",
        )
    floors, count = evaluation["floors"], evaluation["plan"]["count"]
    accuracy = floors["recogniser_accuracy"]
    table.add_section()
    real = f"{floors['nearest_leave_one_out_median']:.2f}"
    right = "" if accuracy is None else f"{accuracy:.1%}"
    table.add_row("real, halves", "", "", "", right, f"{floors['frechet_half_against_half']:.1f}", real)
    table.add_row(f"real, {count:,} of all", "", "", "", "", f"{floors['frechet_count_against_all']:.1f}", "")
    console.print(table)
    console.print(
        "[dim]right: recognised as what was asked for. Frechet: distance to the real images. nearest: median distance "
        "to the nearest training image (real: to the nearest other one).[/dim]"
    )
    for guidance, row in (evaluation["against_monolith"] or {}).items():
        word = "ahead of" if row["ratio"] <= 1 else "behind"
        console.print(
            f"{guidance}: the ensemble ({row['route']}) is {word} the monolith, "
            f"Frechet {row['ensemble']:.1f} / {row['monolith']:.1f} = [bold]{row['ratio']:.2f}[/bold]"
        )
