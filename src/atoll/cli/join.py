"""atoll join: take an order, train it, send it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..artifacts import Store
from ..exchange.join import Joining, Offer
from ..models.accounting import account
from .options import Device, Memory, WorkFolder, gib
from .progress import progress
from .tables import print_line, print_table

USUAL_KEY = Path("~/.ssh/id_ed25519")
REVEALS = (
    "a contribution is the weights, their metadata and the training losses, nothing about this machine. "
    "Your key's fingerprint names your folder in the inbox."
)


def join(
    url: Annotated[str, typer.Argument(help="What the organizer published.")],
    out: WorkFolder = Path("joined"),
    order: Annotated[str | None, typer.Option(help="This order, even if it is taken.")] = None,
    key: Annotated[str | None, typer.Option(help=f"Your SSH key, or its .pub (default: {USUAL_KEY}).")] = None,
    unsigned: Annotated[bool, typer.Option("--unsigned", help="Do not sign, even if there is a key.")] = False,
    device: Device = None,
    memory: Memory = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the orders and the plan; write nothing.")] = False,
) -> None:
    """Take an open order that fits this machine, train it, sign the expert and send it.

    The same command resumes after any stop. The lease of the order is renewed while it trains; if it expires, training
    continues, and two experts of one order are both evaluated and credited. Over plain https the finished folder is
    left here, to be sent by hand.

    \b
    Examples:
      atoll join s3://bucket/flowers --dry-run
      atoll join s3://bucket/flowers --out mine
      atoll join https://flowers.example.org --order 03 --out mine
    """
    usual = USUAL_KEY.expanduser()
    chosen = None if unsigned else key or (str(usual) if usual.is_file() else None)
    joining = Joining(Store.at(url), out, chosen, device, gib(memory), print_line)
    if dry_run:
        return print_plan(joining, order)
    if joining.joined.order is None:
        print_offers(joining.offers(joining.card.orders))
    with progress() as display:
        sent = joining.run(order, display.training())
    name = f"expert {sent.expert.digest[:12]}"
    print_line(f"{name} in {out}/expert: send this folder back" if sent.place is None else f"sent: {name}")


def print_plan(joining: Joining, wanted: str | None) -> None:
    """What would be done, by the current leases and this machine's clock."""
    print_offers(joining.offers(joining.card.orders, dry=True))
    begun, chosen = joining.joined.order is not None, joining.candidates(wanted, dry=True)[0]
    signed = "unsigned" if joining.key is None else f"signed with {joining.key} as {joining.joined.holder}"
    sent = "leave it there to be sent by hand" if joining.card.read_only else "send it"
    taken = "" if begun or chosen.free else ", which is taken"
    which = f"{'resume' if begun else 'take'} order {chosen.listed.order}{taken}"
    print_line(f"would {which}: train it in {joining.folder}, and {sent}, {signed}")
    print_line(REVEALS)


def print_offers(offers: list[Offer]) -> None:
    rows = []
    for offer in offers:
        listed, order, file = offer.listed, offer.order, None if offer.lease is None else offer.lease.file
        state = "free, has an expert" if listed.served else "free"
        if not offer.free:
            state = "taken" if file is None else "done" if file.done else f"taken, {file.progress:.0%}"
        hours = "does not fit" if offer.hours is None else f"{offer.hours:.2g}"
        objective = f"{order.objective.kind} on {order.objective.schedule.name}"
        parameters = f"{account(order.architecture).parameters:,}"
        size, images = f"{listed.bytes / 1e6:,.1f}", f"{order.training.images:,}"
        rows.append((listed.order, objective, parameters, images, size, hours, state))
    print_table("order objective >parameters >images >MB >hours_here state", rows)
