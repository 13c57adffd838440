"""atoll status: what a run has, and what is missing."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from typing import Annotated

import typer
from rich.table import Table

from ..artifacts import Store, UserError
from ..ensemble.status import goes_on, shell, stages
from ..exchange.lease_status import OrderStatus, lease_status, names_by_key
from ..exchange.published import PublishedCard, find_card
from ..exchange.signed import read_signers
from .progress import console
from .tables import plain

SHOWN = 3  # commands
WATCH_SECONDS = 10.0


def status(
    run: Annotated[str, typer.Argument(help="The run")],
    out: Annotated[str | None, typer.Option(help="Also write the table as JSON to this file")] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Of published orders: again every ten seconds")] = False,
    signers: Annotated[
        str | None, typer.Option(help="Of published orders: your allowed_signers file, for names instead of keys")
    ] = None,
) -> None:
    """Show every stage of a run's newest version: there or missing, its digest, and what to do next.

    Of what `atoll publish` put somewhere: who works on which order, how far, hours left, and what came in. Of the
    folder of one expert or student: what it is, who taught it, and its license.

    Examples:

      atoll status runs/demo

      atoll status student

      atoll status s3://bucket/flowers --watch --signers runs/flowers/allowed_signers
    """
    place = Store.at(run)
    if (card := find_card(place)) is not None:
        show_orders(place, card, signers, watch)
        return
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
    first = "next"
    if goes_on(place):
        command = f"atoll run --out {shell(place)}"
        console.print(
            f"next: [bold]{plain(command, 400)}[/bold] does all that is missing, on this machine", soft_wrap=True
        )
        first = "or"
    for number, command in enumerate(commands[:SHOWN]):
        console.print(f"{'then' if number else first}: [bold]{plain(command, 400)}[/bold]", soft_wrap=True)
    if len(commands) > SHOWN:
        console.print(f"and {len(commands) - SHOWN} more, of all that is missing")
    if out is not None:
        target = Store.at(out)
        target.parent.write(target.name, json.dumps([asdict(row) for row in rows], indent=2).encode() + b"\n")


def show_orders(place: Store, card: PublishedCard, signers: str | None, watch: bool) -> None:
    """Published orders, once or until Ctrl-C."""
    listed = None if signers is None else read_signers(place, signers)
    names = {} if listed is None else names_by_key(listed)
    while True:
        console.print(order_table(place, lease_status(place, card), names))
        if not watch:
            return
        time.sleep(WATCH_SECONDS)
        console.clear()


def order_table(place: Store, rows: list[OrderStatus], names: dict[str, str]) -> Table:
    table = Table(title=plain(str(place)), title_justify="left", header_style="bold")
    for column in ("order", "state", "holder"):
        table.add_column(column, overflow="fold")
    for column in ("done", "hours left", "received"):
        table.add_column(column, justify="right")
    for row in rows:
        holder = "" if row.lease is None else names.get(row.lease.holder, row.lease.holder)
        done = "" if row.lease is None else f"{row.lease.progress:.0%}"
        hours = "" if row.hours_left is None else f"{row.hours_left:.1f}"
        received = "not readable" if row.received is None else str(row.received)
        table.add_row(plain(row.order), row.state, plain(holder), done, hours, received)
    return table
