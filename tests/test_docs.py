"""What the documentation lists is what there is."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Literal, get_args, get_origin

from atoll.sampling import Sampling
from atoll.training.execution import Execution

DOCS = Path(__file__).resolve().parents[1] / "docs"


def test_training_md_lists_every_setting_of_an_execution() -> None:
    expected = [row_of(name) for name in Execution.model_fields]
    assert rows_below("training.md", "| setting |") == expected, "docs/training.md should have\n" + "\n".join(expected)


def test_sampling_md_lists_every_field_of_sampling() -> None:
    expected = [
        f"| `{each.name}` | {'none' if each.default is None else each.default} | {each.metadata['help']} |"
        for each in fields(Sampling)
    ]
    assert rows_below("sampling.md", "| field |") == expected, "docs/sampling.md should have\n" + "\n".join(expected)


def rows_below(page: str, head: str) -> list[str]:
    """The rows of the table that begins with this."""
    lines = (DOCS / page).read_text().splitlines()
    start = next(n for n, line in enumerate(lines) if line.startswith(head)) + 2
    return lines[start : next(n for n in range(start, len(lines)) if not lines[n].startswith("|"))]


def row_of(name: str) -> str:
    field = Execution.model_fields[name]
    default = "none" if field.default is None else field.default
    values = "a number" if field.annotation in (int, int | None) else "a name"
    if get_origin(field.annotation) is Literal:
        values = ", ".join(get_args(field.annotation))
    return f"| `{name}` | {default} | {values} | {field.description} |"
