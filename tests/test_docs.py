"""What the documentation lists is what there is."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path
from typing import Literal, get_args, get_origin

import pytest

from atoll.cli import main
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


def test_every_command_of_ensemble_md_does_what_it_says(
    tiny_demo: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One after the other on a demo: each writes a version, and the last brings back the tenth."""
    run = Path(shutil.copytree(tiny_demo, tmp_path / "demo"))
    commands = re.findall(
        r"^atoll (ensemble runs/demo.*?)(?:  #.*)?$", (DOCS / "ensemble.md").read_text(), re.MULTILINE
    )
    assert len(commands) == 7
    before = (run / "ensemble.json").read_bytes()
    for command in commands:
        main(shlex.split(command.replace("runs/demo", str(run))))
    told = capsys.readouterr().out
    assert len(list((run / "ensemble").iterdir())) == 15
    for words in ("route top-1", "no expert serves cluster 3", "serves cluster 3", "to version 12", "to version 10"):
        assert words in told
    kept = [json.loads(data) for data in (before, (run / "ensemble.json").read_bytes())]
    for content in kept:
        for story in ("digest", "version", "predecessor", "change"):
            del content[story]
    assert kept[0] == kept[1]
