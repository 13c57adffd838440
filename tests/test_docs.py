"""What the documentation lists is what there is."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, get_args, get_origin

from atoll.training.execution import Execution

DOCS = Path(__file__).resolve().parents[1] / "docs"


def test_training_md_lists_every_setting_of_an_execution() -> None:
    lines = (DOCS / "training.md").read_text().splitlines()
    start = next(n for n, line in enumerate(lines) if line.startswith("| setting |")) + 2
    end = next(n for n in range(start, len(lines)) if not lines[n].startswith("|"))
    expected = [row_of(name) for name in Execution.model_fields]
    assert lines[start:end] == expected, "docs/training.md should have\n" + "\n".join(expected)


def row_of(name: str) -> str:
    field = Execution.model_fields[name]
    default = "none" if field.default is None else field.default
    values = "a number" if field.annotation in (int, int | None) else "a name"
    if get_origin(field.annotation) is Literal:
        values = ", ".join(get_args(field.annotation))
    return f"| `{name}` | {default} | {values} | {field.description} |"
