"""atoll publish: put a run's orders where contributors can take them."""

from __future__ import annotations

from typing import Annotated

import typer

from ..artifacts import Store, UserError
from ..exchange.published import LEASE_SECONDS, policy
from ..exchange.published import publish as publish_run
from .progress import progress
from .tables import print_line

POLICY = "contributors-policy.json"


def publish(
    run: Annotated[str, typer.Argument(help="The run.")],
    url: Annotated[str, typer.Argument(help="Where contributors read: a folder, or a URL such as s3://bucket/it.")],
    key: Annotated[str | None, typer.Option(help="Sign the orders with this SSH key.")] = None,
    read_only: Annotated[bool, typer.Option("--read-only", help="No leases; experts are sent by hand.")] = False,
    lease_hours: Annotated[float, typer.Option(help="A lease not renewed for so long expires.")] = LEASE_SECONDS / 3600,
) -> None:
    """Copy what contributors need, and no more: open orders and their shards. Run it again to add new ones.

    The holdout, the index, evaluations and your list of signers never leave the run. Contributors write below inbox/
    and leases/ only; for s3:// a policy that allows just that is written to the run (docs/trust.md).
    `atoll admit --inbox URL/inbox` checks what comes back.

    \b
    Examples:
      atoll publish runs/flowers s3://bucket/flowers --key ~/.ssh/id_ed25519
      atoll publish runs/flowers /srv/www/flowers --read-only
    """
    if lease_hours <= 0:
        raise UserError(f"--lease-hours {lease_hours}: use a positive number")
    here, there = Store.at(run), Store.at(url)
    if here.url == there.url:
        raise UserError(f"{url}: is the run itself, with its holdout; give another place")
    with progress() as display:
        card = publish_run(
            here,
            there,
            key=key,
            read_only=read_only,
            lease_seconds=3600 * lease_hours,
            progress=display,
        )
    print_line(f"published: {len(card.orders)} orders at {there}")
    if url.startswith("s3"):
        here.write(POLICY, policy(there.url, card))
        print_line(f"give each contributor a user with this policy, named by their key: {here}/{POLICY}")
    how = "send their folders to you" if read_only else "run this, and nothing else"
    print_line(f"contributors {how}: atoll join {there}")
