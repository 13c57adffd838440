"""The tables of an evaluation, and text from others in a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.markup import escape
from rich.table import Table

from ..artifacts import sanitize
from ..evaluation.scores import number_title, number_written, other_numbers
from .progress import console


def plain(text: str, most: int = 120) -> str:
    """Untrusted text for rich: no markup, no control characters, one line, at most so long."""
    return escape(sanitize(text, most))


def print_evaluation(evaluation: dict[str, Any]) -> None:
    """The configurations, the real-data baselines, and the ensemble compared with the monolith."""
    arms, floors, count = evaluation["arms"], evaluation["floors"], evaluation["plan"]["count"]
    rows = []
    for arm in arms:
        model = f"student {arm['student']}" if arm["model"] == "student" else arm["model"]
        router = (arm["router"] or "own") if arm["model"] == "ensemble" else ""
        right = number_written("recognised", arm["recognised"], arm["intervals"].get("recognised"))
        distance = number_written("frechet", arm["frechet"], arm["frechet_interval"])
        nearest = f"{arm['nearest_median']:.2f}"
        rows.append((model, router, arm["route"] or "", f"{arm['guidance']:g}", right, distance, nearest))
    accuracy, has_classes = floors["recogniser_accuracy"], any(row[4] for row in rows)
    right = f"{accuracy:.1%}" if accuracy is not None and has_classes else ""
    halves, whole = (
        number_written("frechet", floors[f"frechet_{of}"]) for of in ("half_against_half", "count_against_all")
    )
    rows.append(("real, halves", "", "", "", right, halves, f"{floors['nearest_leave_one_out_median']:.2f}"))
    rows.append((f"real, {count:,} of all", "", "", "", "", whole, ""))
    heads = ("model", "router", "route", "guidance", "right", "Frechet", "nearest")
    kept = [column for column in range(len(heads)) if any(row[column] for row in rows)]
    table = Table(title="Quality", title_justify="left", header_style="bold")
    for column in kept:
        table.add_column(heads[column], justify="left" if column < 3 else "right")
    for number, row in enumerate(rows):
        table.add_row(*(row[column] for column in kept), end_section=number == len(arms) - 1)
    console.print(table)
    print_numbers("Other scores", [(arm["name"], arm) for arm in arms], floors["scores"])
    for name, other in evaluation["extractors"].items():
        rows_of = [(arm["name"], with_distance(arm["extractors"][name])) for arm in arms]
        real = {"frechet": other["floors"]["frechet_half_against_half"], **other["floors"]["scores"]}
        print_numbers(f"By the features of {plain(name)}", rows_of, real)
    chance, directions = floors.get("chance"), evaluation.get("frechet_directions")
    by_chance = "" if chance is None else f" (chance {chance:.1%})"
    classes = f"right: classified as the prompt{by_chance}. " if has_classes else ""
    among = "" if directions is None else f" in the {directions} directions they vary most in"
    console.print(
        f"[dim]{classes}Frechet: distance to the real images{among}. nearest: median distance to the nearest training "
        "image (real: to the nearest other one). \u00b1: 95 % interval.[/dim]"
    )
    for guidance, row in (evaluation["against_monolith"] or {}).items():
        word = "ahead of" if row["ratio"] <= 1 else "behind"
        console.print(
            f"{guidance}: the ensemble ({row['route']}) is {word} the monolith, "
            f"Frechet {row['ensemble']:.1f} / {row['monolith']:.1f} = [bold]{row['ratio']:.2f}[/bold]"
        )


def with_distance(found: dict[str, Any]) -> dict[str, Any]:
    """The scores of another extractor with its Frechet distance among them, which is in no other table."""
    return {
        "scores": {"frechet": found["frechet"], **found["scores"]},
        "intervals": {"frechet": found["frechet_interval"], **found["intervals"]},
    }


def print_numbers(title: str, rows: Sequence[tuple[str, dict[str, Any]]], real: dict[str, float]) -> None:
    """Each row has a name, and `scores` with their `intervals`; the last row is of real images."""
    shown = other_numbers(found for _, found in rows)
    table = Table(title=title, title_justify="left", header_style="bold")
    table.add_column("configuration")
    for name in shown:
        table.add_column(number_title(name), justify="right")
    for arm, found in rows:
        scores, ends = found["scores"], found["intervals"]
        table.add_row(plain(arm), *(number_written(name, scores.get(name), ends.get(name)) for name in shown))
    table.add_section()
    table.add_row("real, halves", *(number_written(name, real.get(name)) for name in shown))
    console.print(table)
