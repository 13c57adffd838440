"""atoll status: what a run has, and what is missing."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer
from rich.table import Table

from ..artifacts import Store, UserError
from ..ensemble.status import stages
from .bars import console
from .tables import plain

SHOWN = 3  # commands


def status(
    run: Annotated[str, typer.Argument(help="The run")],
    out: Annotated[str | None, typer.Option(help="Also write the table as JSON to this file")] = None,
) -> None:
    """Show every stage of a run's newest version: there or missing, its digest, and what to do next.

    Example:

      atoll status runs/demo
    """
    place = Store.at(run)
    if not place.exists():
        raise UserError(f"{run}: no such run; check the path, or make one with `atoll demo --out {run}`")
    rows = stages(place)
    table = Table(title=plain(str(place)), title_justify="left", header_style="bold")
    for column in ("stage", "state", "digest", "what"):
        table.add_column(column, overflow="fold")
    for row in rows:
        state = "[green]there[/green]" if row.digest else "[yellow]missing[/yellow]"
        table.add_row(plain(row.name), state, row.digest[:12], plain(row.what))
    console.print(table)
    commands = list(dict.fromkeys(row.next for row in rows if row.next))
    for number, command in enumerate(commands[:SHOWN]):
        console.print(f"{'then' if number else 'next'}: [bold]{plain(command, 400)}[/bold]", soft_wrap=True)
    if len(commands) > SHOWN:
        console.print(f"and {len(commands) - SHOWN} more, of all that is missing")
    if out is not None:
        target = Store.at(out)
        target.parent.write(target.name, json.dumps([asdict(row) for row in rows], indent=2).encode() + b"\n")
