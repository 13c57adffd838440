"""Tables more than one verb prints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.markup import escape
from rich.table import Table

from ..artifacts import sanitize
from ..evaluation.scores import number_title, number_written, other_numbers
from .progress import console

WORDS = 3  # columns of the evaluation that hold words


def plain(text: str, most: int = 120) -> str:
    """Text that may come from a stranger, for rich: no markup, no control characters, no end of line, not endless."""
    return escape(sanitize(text, most))


def print_scores(evaluation: dict[str, Any]) -> None:
    """Every number of every other score: a row for each arm, and one for what real images have."""
    arms, floors = evaluation["arms"], evaluation["floors"]
    print_numbers("Other scores", [(arm["name"], arm) for arm in arms], floors["scores"])
    for name, other in evaluation["extractors"].items():
        rows = [(arm["name"], with_distance(arm["extractors"][name])) for arm in arms]
        real = {"frechet": other["floors"]["frechet_half_against_half"], **other["floors"]["scores"]}
        print_numbers(f"By the features of {plain(name)}", rows, real)


def with_distance(found: dict[str, Any]) -> dict[str, Any]:
    """What another extractor has measured, its Frechet distance among the scores: there is no other table of it."""
    return {
        "scores": {"frechet": found["frechet"], **found["scores"]},
        "intervals": {"frechet": found["frechet_interval"], **found["intervals"]},
    }


def print_numbers(title: str, rows: Sequence[tuple[str, dict[str, Any]]], real: dict[str, float]) -> None:
    """Each row has a name, and `scores` with their `intervals`."""
    shown = other_numbers(found for _, found in rows)
    table = Table(title=title, title_justify="left", header_style="bold")
    table.add_column("arm")
    for name in shown:
        table.add_column(number_title(name), justify="right")
    for arm, found in rows:
        scores, ends = found["scores"], found["intervals"]
        table.add_row(plain(arm), *(number_written(name, scores.get(name), ends.get(name)) for name in shown))
    table.add_section()
    table.add_row("real, halves", *(number_written(name, real.get(name)) for name in shown))
    console.print(table)


def print_evaluation(evaluation: dict[str, Any]) -> None:
    """The arms, the floors, and where the ensemble stands against the monolith."""
    floors, count = evaluation["floors"], evaluation["plan"]["count"]
    rows = []
    for arm in evaluation["arms"]:
        router = "" if arm["model"] != "ensemble" else (arm["router"] or "own")
        recognised = number_written("recognised", arm["recognised"], arm["intervals"].get("recognised"))
        distance = number_written("frechet", arm["frechet"], arm["frechet_interval"])
        numbers = (f"{arm['guidance']:g}", recognised, distance, f"{arm['nearest_median']:.2f}")
        model = f"student {arm['student']}" if arm["model"] == "student" else arm["model"]
        rows.append((model, router, arm["route"] or "", *numbers))
    seen, accuracy = any(row[4] for row in rows), floors["recogniser_accuracy"]
    real = f"{floors['nearest_leave_one_out_median']:.2f}"
    right = "" if accuracy is None or not seen else f"{accuracy:.1%}"
    rows.append(
        ("real, halves", "", "", "", right, number_written("frechet", floors["frechet_half_against_half"]), real)
    )
    rows.append(
        (f"real, {count:,} of all", "", "", "", "", number_written("frechet", floors["frechet_count_against_all"]), "")
    )
    heads = ("model", "router", "route", "guidance", "right", "Frechet", "nearest")
    kept = [column for column in range(len(heads)) if any(row[column] for row in rows)]
    table = Table(title="Quality", title_justify="left", header_style="bold")
    for column in kept:
        table.add_column(heads[column], justify="left" if column < WORDS else "right")
    for number, row in enumerate(rows):
        if number == len(evaluation["arms"]):
            table.add_section()
        table.add_row(*(row[column] for column in kept))
    console.print(table)
    print_scores(evaluation)
    chance = floors.get("chance")
    by_chance = "" if chance is None else f" (by chance {chance:.1%})"
    directions = evaluation.get("frechet_directions")
    among = "" if directions is None else f" in the {directions} directions they vary most in"
    told = f"right: recognised as what was asked for{by_chance}. " if seen else ""
    console.print(
        f"[dim]{told}Frechet: distance to the real images{among}. nearest: median distance "
        "to the nearest training image (real: to the nearest other one). \u00b1: 19 times of 20.[/dim]"
    )
    for guidance, row in (evaluation["against_monolith"] or {}).items():
        word = "ahead of" if row["ratio"] <= 1 else "behind"
        console.print(
            f"{guidance}: the ensemble ({row['route']}) is {word} the monolith, "
            f"Frechet {row['ensemble']:.1f} / {row['monolith']:.1f} = [bold]{row['ratio']:.2f}[/bold]"
        )
