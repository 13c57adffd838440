"""docs/verbs is what `--help` says; and every option is explained."""

from __future__ import annotations

import runpy
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def test_pages_of_verbs_are_those_of_help() -> None:
    made = runpy.run_path(str(ROOT / "tools" / "write_verbs.py"))["pages"]()
    there = {path.name: path.read_text() for path in (ROOT / "docs" / "verbs").glob("*.md")}
    assert there == made, "docs/verbs differs from --help: run `make docs`"
    for name, text in made.items():
        assert "|  |\n" not in text.split("| option |")[-1], f"{name}: an option without a word of help"
