"""Write docs/verbs/: a page per verb, made from what `atoll VERB --help` says, so that it cannot drift. `make docs`."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import typer
from typer.main import get_command

from atoll.cli import VERBS

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "verbs"
COMMAND = re.compile(r"^(?:atoll|torchrun) ")


def pages() -> dict[str, str]:
    """Every page by its file name."""
    index = [
        "# The verbs",
        "",
        "Made by `make docs` from `atoll VERB --help`.",
        "",
        "| verb | who | |",
        "|---|---|---|",
    ]
    index += [f"| [`atoll {verb}`]({verb}.md) | {who.lower()} | {line} |" for verb, (who, line) in VERBS.items()]
    return {"README.md": "\n".join(index) + "\n"} | {f"{verb}.md": page(verb) for verb in VERBS}


def page(verb: str) -> str:
    """A verb's usage, what it does, examples, and every option with its default."""
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.command()(getattr(importlib.import_module(f"atoll.cli.{verb}"), verb))
    command: Any = get_command(app)
    shown = [p for p in command.params if not getattr(p, "hidden", False)]
    arguments = [p for p in shown if p.param_type_name == "argument"]
    options = [p for p in shown if p.param_type_name == "option"]
    usage = " ".join(["atoll", verb, *(p.name.upper() + ("..." if p.nargs != 1 else "") for p in arguments)])
    lines = [f"# atoll {verb}", "", VERBS[verb][1], "", "```", f"{usage} [OPTIONS]", "```", "", *told(command.help)]
    lines += ["", "| argument | |", "|---|---|"]
    lines += [f"| `{p.name.upper()}` | {cell(p.help)} |" for p in arguments]
    if not arguments:
        lines = lines[:-2]
    lines += ["", "| option | default | |", "|---|---|---|"]
    lines += [f"| {names(p)} | {default(p)} | {cell(p.help)} |" for p in options]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)) + "\n"


def told(text: str) -> list[str]:
    """The docstring: paragraphs as they are, commands as blocks of code."""
    lines: list[str] = []
    for paragraph in (part.strip() for part in text.split("\n\n")):
        commands = [line.strip() for line in paragraph.splitlines()]
        if COMMAND.match(paragraph):
            if lines[-1:] == ["```"]:  # one block for commands that follow each other
                lines.pop()
            else:
                lines += ["", "```sh"]
            lines += [*commands, "```"]
        elif paragraph not in ("Example:", "Examples:"):
            lines += ["", *(line.rstrip() for line in commands)]
    return lines


def names(option: Any) -> str:
    return ", ".join(f"`{name}`" for name in (*option.opts, *option.secondary_opts))


def default(option: Any) -> str:
    value = option.default
    if option.required:
        return "needed"
    if value is None or value == [] or value is False or callable(value):
        return ""
    if value is True:
        return "yes"
    return f"`{' '.join(map(str, value))}`" if isinstance(value, list | tuple) else f"`{value}`"


def cell(text: str | None) -> str:
    return (text or "").replace("|", "\\|").replace("\n", " ")


def main() -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    written = pages()
    for name, text in written.items():
        (FOLDER / name).write_text(text)
    for stale in set(FOLDER.glob("*.md")) - {FOLDER / name for name in written}:
        stale.unlink()


if __name__ == "__main__":
    main()
