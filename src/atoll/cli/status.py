"""atoll status: what a run has, and what is missing."""

from __future__ import annotations

import time
from typing import Annotated

import typer
from rich.table import Table

from ..artifacts import Store, UserError
from ..exchange.lease_status import OrderStatus, lease_status, names_by_key
from ..exchange.published import find_card
from ..exchange.signed import read_signers
from ..registry.status import goes_on, shell, stages
from .progress import console
from .tables import plain

SHOWN = 3  # commands
WATCH_SECONDS = 10.0


def status(
    run: Annotated[str, typer.Argument(help="Run, published orders, or folder of one expert.")],
    watch: Annotated[bool, typer.Option("--watch", help="Of published orders: again every ten seconds.")] = False,
    signers: Annotated[str | None, typer.Option(help="Of published orders: allowed_signers file with names.")] = None,
) -> None:
    """Show every stage of a run's newest version, there or missing, and the next commands.

    Of published orders: who trains which, how far, and what was received.

    \b
    Examples:
      atoll status runs/demo
      atoll status student
      atoll status s3://bucket/flowers --watch --signers runs/flowers/allowed_signers
    """
    place = Store.at(run)
    if (card := find_card(place)) is not None:
        listed = None if signers is None else read_signers(place, signers)
        names = {} if listed is None else names_by_key(listed)
        console.print(order_table(place, lease_status(place, card), names))
        while watch:
            time.sleep(WATCH_SECONDS)
            console.clear()
            console.print(order_table(place, lease_status(place, card), names))
        return
    if not place.exists():
        raise UserError(f"{run}: no such run; check the path, or make one with `atoll demo --out {run}`")
    rows = stages(place)
    table = titled_table(place, "stage", "state", "digest", "what")
    for row in rows:
        state = "[green]there[/green]" if row.digest else "[yellow]missing[/yellow]"
        table.add_row(plain(row.name), state, row.digest[:12], plain(row.what))
    console.print(table)
    commands = list(dict.fromkeys(row.next for row in rows if row.next))
    first = "next"
    if goes_on(place):
        command = plain(f"atoll run --out {shell(place)}", 400)
        console.print(f"next: [bold]{command}[/bold] does all that is missing, on this machine", soft_wrap=True)
        first = "or"
    for number, command in enumerate(commands[:SHOWN]):
        console.print(f"{'then' if number else first}: [bold]{plain(command, 400)}[/bold]", soft_wrap=True)
    if len(commands) > SHOWN:
        console.print(f"and {len(commands) - SHOWN} more, of all that is missing")


def titled_table(place: Store, *columns: str) -> Table:
    table = Table(title=plain(str(place)), title_justify="left", header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def order_table(place: Store, rows: list[OrderStatus], names: dict[str, str]) -> Table:
    table = titled_table(place, "order", "state", "holder")
    for column in ("done", "hours left", "received"):
        table.add_column(column, justify="right")
    for row in rows:
        holder = "" if row.lease is None else names.get(row.lease.holder, row.lease.holder)
        done = "" if row.lease is None else f"{row.lease.progress:.0%}"
        hours = "" if row.hours_left is None else f"{row.hours_left:.1f}"
        received = "not readable" if row.received is None else str(row.received)
        table.add_row(plain(row.order), row.state, plain(holder), done, hours, received)
    return table
