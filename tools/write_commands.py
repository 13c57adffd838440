"""Write docs/commands/: a page per command, made from its `--help`. `make docs`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import typer
from typer.cli import get_docs_for_click

from atoll.cli import COMMANDS, command_of

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "commands"
EXAMPLES = re.compile(r"\x08?\n?Examples:\n((?:\s*\n| +(?:atoll|torchrun) .*\n)+)")


def pages() -> dict[str, str]:
    """Every page by its file name."""
    index = ["# Commands", "", "Made by `make docs` from `atoll COMMAND --help`.", "", "| command | who | |"]
    index += ["|---|---|---|"]
    index += [f"| [`atoll {name}`]({name}.md) | {who.lower()} | {line} |" for name, (who, line) in COMMANDS.items()]
    return {"README.md": "\n".join(index) + "\n"} | {f"{name}.md": page(name) for name in COMMANDS}


def page(name: str) -> str:
    command: Any = command_of(name)
    text = (
        get_docs_for_click(obj=command, ctx=typer.Context(command), name=f"atoll {name}")
        .replace("  [", " [")
        .rstrip("\n")
        + "\n"
    )
    return EXAMPLES.sub(
        lambda found: (
            "\n```sh\n" + "\n".join(line.strip() for line in found[1].splitlines() if line.strip()) + "\n```\n\n"
        ),
        text,
    )


def main() -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    for stale in FOLDER.glob("*.md"):
        stale.unlink()
    for name, text in pages().items():
        (FOLDER / name).write_text(text)


if __name__ == "__main__":
    main()
