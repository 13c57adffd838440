"""atoll admit: check contributions and add them to the model."""

from __future__ import annotations

from typing import Annotated

import typer

from ..artifacts import Store, UserError
from ..exchange.admission import Admission
from ..exchange.admission import admit as admit_one
from ..exchange.inbox import LeftInInbox, inbox_of, refused_by_sender
from ..exchange.thresholds import AdmissionThresholds
from ..islands.launch import check_finished
from .options import Device
from .progress import progress
from .tables import print_line

MOST = AdmissionThresholds.contributions


def admit(
    out: Annotated[str, typer.Option(help="The run that gave the orders.")],
    contributions: Annotated[list[str] | None, typer.Argument(help="Folders or URLs of contributed experts.")] = None,
    inbox: Annotated[str | None, typer.Option(help="Take all in this inbox: RUN/inbox, or a URL.")] = None,
    replace: Annotated[bool, typer.Option("--replace", help="Activate it even if the active one is no worse.")] = False,
    recheck: Annotated[bool, typer.Option("--recheck", help="Check again what was refused before.")] = False,
    signers: Annotated[str | None, typer.Option(help="Who may sign (default: RUN/allowed_signers).")] = None,
    unsigned_ok: Annotated[bool, typer.Option("--unsigned-ok", help="Also admit what no listed key signed.")] = False,
    max_per_contributor: Annotated[int, typer.Option(help="Most of an inbox to check of one sender.", min=1)] = MOST,
    device: Device = None,
) -> None:
    """Check each contributed expert in quarantine, and add those that pass to the model.

    The active expert of a cluster stays unless the new one is better by a margin, or --replace. A refused one leaves
    its reasons in RUN/quarantine, and the exit code is 2. With allowed_signers or --inbox, a listed key must have
    signed. docs/trust.md has the table of checks.

    \b
    Examples:
      atoll admit from-alice/ from-bob/ --out runs/flowers
      atoll admit --inbox runs/flowers/inbox --out runs/flowers
      atoll admit s3://bucket/inbox/carol/03 --out runs/flowers --device cuda
    """
    run, places = Store.at(out), list(contributions or ())
    if inbox is not None:
        places += [str(place) for place in inbox_of(inbox)]
        if not places:
            return print_line("the inbox is empty")
    if not places:
        raise UserError("admit: name expert folders, or an --inbox to take all from")
    checked = None if inbox is None else refused_by_sender(run)
    unsigned = True if unsigned_ok else None if inbox is None else False
    refused, left = 0, []
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
                        unsigned_ok=unsigned,
                        checked=checked,
                        thresholds=AdmissionThresholds(contributions=max_per_contributor),
                    )
                )
            except LeftInInbox as waiting:
                left.append(str(waiting))
            except UserError as error:
                if len(places) == 1:
                    raise
                refused += 1
                typer.echo(f"atoll: {error}", err=True)
    if left:
        print_line(left[0] + (f"; so are {len(left) - 1} more" if len(left) > 1 else ""))
    if refused:
        others = "" if refused == len(places) - len(left) else "; the others are in"
        raise UserError(f"{refused} of {len(places) - len(left)} were not admitted, for the reasons above{others}")


def print_admission(result: Admission) -> None:
    member, score = result.member, result.member.val_loss
    state = "already admitted" if result.already else "admitted"
    if result.incumbent is not None and not result.already:
        state += f", but {result.incumbent} stays active (not better by a margin; --replace activates it)"
    measured = "" if score is None else f", val loss {score.inside:.4f}, of a Gaussian {score.gaussian:.4f}"
    by = "" if member.contributor is None else f", by {member.contributor}"
    if result.copied_by is not None:
        by += f"; {result.copied_by} sent the same and is credited, too"
    print_line(f"{state}: cluster {member.cluster}, {member.objective}{measured} -> {member.path}{by}")
