"""atoll join: take an order, train it, send it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from ..artifacts import Store, UserError
from ..exchange.join import Joining, Offer
from ..training.resources import parse_memory
from .options import Device, Memory
from .progress import console, print_line, progress
from .tables import plain

REVEALS = (
    "a contribution is the weights, their card and the training losses, nothing about this machine. "
    "Your key's fingerprint names your folder in the inbox."
)


def join(
    url: Annotated[str, typer.Argument(help="What the organizer published")],
    out: Annotated[str, typer.Option(help="A folder for the work; the same one resumes")] = "joined",
    order: Annotated[str | None, typer.Option(help="This order, even if it is taken")] = None,
    key: Annotated[
        str | None, typer.Option(help="Your SSH key, or its .pub with an agent; default: ~/.ssh/id_ed25519 if there")
    ] = None,
    unsigned: Annotated[bool, typer.Option("--unsigned", help="Do not sign, even if there is a key")] = False,
    device: Device = None,
    memory: Memory = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show the orders and what would be done; write nothing")
    ] = False,
    quiet: Annotated[bool, typer.Option(help="Print errors only")] = False,
) -> None:
    """Show the open orders, take one that fits this machine, train it, sign the expert and send it.

    The same command resumes after any stop. The lease of the order is renewed while it trains; if it expires, training
    goes on, and two experts of one order are both evaluated and credited. Over plain https the finished folder is left
    here, to be sent by hand.

    Examples:

      atoll join s3://bucket/flowers --dry-run

      atoll join s3://bucket/flowers --out mine

      atoll join https://flowers.example.org --order 03 --out mine
    """
    if "://" in out:
        raise UserError(f"--out {out}: give a local folder")
    usual = Path("~/.ssh/id_ed25519").expanduser()
    chosen = None if unsigned else (key or (str(usual) if usual.is_file() else None))
    limit = None if memory is None else parse_memory(memory)
    joining = Joining(Store.at(url), Path(out), chosen, device, limit, (lambda text: None) if quiet else print_line)
    if dry_run:
        print_plan(joining, order, out, chosen)
        return
    if not quiet and joining.joined.order is None:
        console.print(table(joining.offers()))
    with progress(quiet=quiet) as display:
        sent = joining.run(order, display.training())
    if quiet:
        return
    if sent.place is None:
        console.print(f"expert {sent.expert.digest[:12]} in [bold]{plain(out)}/expert[/bold]: send this folder back")
    else:
        console.print(f"sent: expert {sent.expert.digest[:12]}; nothing more to do", soft_wrap=True)


def print_plan(joining: Joining, wanted: str | None, out: str, key: str | None) -> None:
    """What would be done, by the current leases and this machine's clock."""
    offers = joining.offers(dry=True)
    console.print(table(offers))
    begun, settled = joining.joined.order is not None, joining.settled(wanted)
    invited = [settled] if settled is not None else joining.inviting(offers)
    if not invited:
        console.print("would take none: no order is free that fits this machine; --order trains one that is taken")
        return
    (chosen,) = [offer for offer in offers if offer.order == invited[0]]
    taken = "" if chosen.free or begun else ", which is taken"
    signed = "unsigned" if key is None else f"signed with {plain(key)} as {joining.joined.holder}"
    sent = "leave it there to be sent by hand" if joining.card.read_only else "send it"
    which = f"{'resume' if begun else 'take'} order [bold]{plain(chosen.order.order)}[/bold]{taken}"
    console.print(f"would {which}: train it in {plain(out)}, and {sent}, {signed}", soft_wrap=True)
    console.print(REVEALS)


def table(offers: list[Offer]) -> Table:
    shown = Table(header_style="bold", box=None, padding=(0, 2, 0, 0))
    shown.add_column("order")
    shown.add_column("objective")
    for number in ("parameters", "images", "MB", "hours here"):
        shown.add_column(number, justify="right")
    shown.add_column("state")
    for offer in offers:
        order = offer.order
        hours = "does not fit" if offer.hours is None else f"{offer.hours:.2g}"
        size = f"{order.bytes / 1e6:,.1f}"
        row = [plain(order.order), plain(order.objective), f"{offer.parameters:,}", f"{order.images:,}", size, hours]
        shown.add_row(*row, state_of(offer))
    return shown


def state_of(offer: Offer) -> str:
    file = None if offer.lease is None else offer.lease.file
    if file is not None and file.done:
        return "done"
    if not offer.free:
        return "taken" if file is None else f"taken, {file.progress:.0%}"
    return "free, has an expert" if offer.order.served else "free"
