"""docs/commands is what `--help` prints; every option is explained, and every text is short."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from atoll.cli import COMMANDS, command_of

ROOT = Path(__file__).resolve().parents[1]


def test_pages_of_commands_are_those_of_help() -> None:
    made = runpy.run_path(str(ROOT / "tools" / "write_commands.py"))["pages"]()
    there = {path.name: path.read_text() for path in (ROOT / "docs" / "commands").glob("*.md")}
    assert there == made, "docs/commands differs from --help: run `make docs`"


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_is_explained(name: str) -> None:
    command = command_of(name)
    assert [option.name for option in command.params if not option.help or option.help.startswith("(")] == []
