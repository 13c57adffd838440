"""atoll status: what a run has, and what is missing."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.text import Text

from ..artifacts import Store, UserError
from ..exchange.lease_status import OrderStatus, lease_status, names_by_key
from ..exchange.published import find_card
from ..exchange.signed import read_signers
from ..registry.status import goes_on, shell, stages
from .tables import print_line, print_table

SHOWN = 3  # commands


def status(
    run: Annotated[str, typer.Argument(help="Run, published orders, or folder of one expert.")],
    signers: Annotated[str | None, typer.Option(help="Of published orders: allowed_signers file with names.")] = None,
) -> None:
    """Show every stage of a run's newest version, there or missing, and the next commands.

    Of published orders: who trains which, how far, and what was received.

    \b
    Examples:
      atoll status runs/demo
      atoll status student
      atoll status s3://bucket/flowers --signers runs/flowers/allowed_signers
    """
    place = Store.at(run)
    if (card := find_card(place)) is not None:
        listed = None if signers is None else read_signers(place, signers)
        print_orders(place, lease_status(place, card), {} if listed is None else names_by_key(listed))
        return
    if not place.exists():
        raise UserError(f"{run}: no such run; check the path, or make one with `atoll demo --out {run}`")
    rows = stages(place)
    there, missing = Text("there", "green"), Text("missing", "yellow")
    table = [(row.name, there if row.digest else missing, row.digest[:12], row.what) for row in rows]
    print_table("stage state digest what", table, str(place))
    commands = list(dict.fromkeys(row.next for row in rows if row.next))
    words = ["next", *["then"] * (SHOWN - 1)]
    if goes_on(place):
        print_line(f"next: atoll run --out {shell(place)} does all that is missing, on this machine")
        words[0] = "or"
    for word, command in zip(words, commands, strict=False):
        print_line(f"{word}: {command}")
    if len(commands) > SHOWN:
        print_line(f"and {len(commands) - SHOWN} more, of all that is missing")


def print_orders(place: Store, rows: list[OrderStatus], names: dict[str, str]) -> None:
    """One row per published order."""
    table = []
    for row in rows:
        holder = "" if row.lease is None else names.get(row.lease.holder, row.lease.holder)
        done = "" if row.lease is None else f"{row.lease.progress:.0%}"
        hours = "" if row.hours_left is None else f"{row.hours_left:.1f}"
        received = "not readable" if row.received is None else str(row.received)
        table.append((row.order, row.state, holder, done, hours, received))
    print_table("order state holder >done >hours_left >received", table, str(place))
