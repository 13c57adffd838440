"""atoll admit: check contributions and add them to the model."""

from __future__ import annotations

from typing import Annotated

import typer

from ..artifacts import Store, UserError
from ..exchange.admission import Admission
from ..exchange.admission import admit as admit_one
from ..exchange.inbox import Quota, QuotaExceeded, inbox_of
from ..exchange.thresholds import AdmissionThresholds
from ..islands.launch import check_finished
from .options import Device
from .progress import console, progress
from .tables import plain


def admit(
    out: Annotated[str, typer.Option(help="The run that gave the orders.")],
    contributions: Annotated[list[str] | None, typer.Argument(help="Folders or URLs of contributed experts.")] = None,
    inbox: Annotated[bool, typer.Option("--inbox", help="All contributions in the run's inbox.")] = False,
    inbox_at: Annotated[str | None, typer.Option(help="All contributions in this inbox, a folder or URL.")] = None,
    replace: Annotated[bool, typer.Option("--replace", help="Activate it even if the active one is no worse.")] = False,
    recheck: Annotated[bool, typer.Option("--recheck", help="Check again what was refused before.")] = False,
    signers: Annotated[str | None, typer.Option(help="Who may sign (default: RUN/allowed_signers).")] = None,
    unsigned_ok: Annotated[bool, typer.Option("--unsigned-ok", help="Also admit what no listed key signed.")] = False,
    max_per_contributor: Annotated[
        int, typer.Option(help="Of an inbox: contributions of one key to check.", min=1)
    ] = AdmissionThresholds.contributions,
    device: Device = None,
) -> None:
    """Check each contributed expert in quarantine, and add those that pass to the model.

    The active expert of a cluster stays unless the newcomer is better by a margin, or --replace. A refused one leaves
    its reasons in RUN/quarantine, and the exit code is 2. With allowed_signers or --inbox, a listed key must have
    signed. docs/trust.md has the table of checks.

    \b
    Examples:
      atoll admit from-alice/ from-bob/ --out runs/flowers
      atoll admit --inbox --out runs/flowers
      atoll admit s3://bucket/inbox/carol/03 --out runs/flowers --device cuda
    """
    run = Store.at(out)
    places = list(contributions or ())
    quota = None
    if inbox or inbox_at is not None:
        quota = Quota(run, max_per_contributor)
        places += [str(place) for place in inbox_of(run, inbox_at)]
        if not places:
            console.print("the inbox is empty")
            return
    if not places:
        raise UserError("admit: name expert folders, or use --inbox for all in the inbox")
    known = True if unsigned_ok else (False if inbox or inbox_at is not None else None)
    refused, left = [], []
    with progress() as display:
        for number, place in enumerate(places):
            display("checking experts", number, len(places))
            try:
                check_finished(place)
                print_admission(
                    admit_one(
                        run,
                        place,
                        replace=replace,
                        recheck=recheck,
                        device=device,
                        signers=signers,
                        unsigned_ok=known,
                        quota=quota,
                    )
                )
            except QuotaExceeded as waiting:
                left.append(str(waiting))
            except UserError as error:
                if len(places) == 1:
                    raise
                refused.append(place)
                typer.echo(f"atoll: {error}", err=True)
    if left:
        console.print(plain(left[0], 600), soft_wrap=True)
        if len(left) > 1:
            console.print(f"so are {len(left) - 1} more", soft_wrap=True)
    if refused:
        checked = len(places) - len(left)
        others = "" if len(refused) == checked else "; the others are in"
        raise UserError(f"{len(refused)} of {checked} were not admitted, for the reasons above{others}")


def print_admission(result: Admission) -> None:
    member, score = result.member, result.member.val_loss
    measured = "" if score is None else f", error {score.inside:.4f} inside, a Gaussian {score.gaussian:.4f}"
    state = "already admitted" if result.already else "admitted"
    if result.incumbent is not None and not result.already:
        state += f", but {result.incumbent} stays active (not better by a margin; --replace activates it)"
    what = f"cluster {member.cluster}, {plain(member.objective)}{measured}"
    line = f"{state}: {what} -> [bold]{plain(member.path)}[/bold]"
    by = "" if member.contributor is None else f", by {plain(member.contributor)}"
    if result.copied_by is not None:
        by += f"; {plain(result.copied_by)} sent the same and is credited, too"
    console.print(f"{line}{by}", soft_wrap=True)
