"""atoll admit: let contributions into the ensemble."""

from __future__ import annotations

from typing import Annotated

import typer

from ..artifacts import UserError
from ..ensemble.versions import clean_run
from ..exchange.admit import Admission
from ..exchange.admit import admit as admit_one
from ..exchange.inbox import MOST_EACH, Allowance, HadTheirShare, inbox_of
from ..islands.launch import check_finished
from .progress import console, progress
from .tables import plain


def admit(
    out: Annotated[str, typer.Option(help="The run that gave the orders")],
    contributions: Annotated[
        list[str] | None, typer.Argument(help="Expert folders as they came back, on disk or fsspec URLs")
    ] = None,
    inbox: Annotated[bool, typer.Option("--inbox", help="All that came into the inbox of the run")] = False,
    inbox_at: Annotated[str | None, typer.Option(help="All that came into this inbox, a folder or URL")] = None,
    replace: Annotated[
        bool, typer.Option("--replace", help="Let it serve even if whoever does now is no worse")
    ] = False,
    again: Annotated[bool, typer.Option("--again", help="Judge anew what was refused before")] = False,
    signers: Annotated[
        str | None, typer.Option(help="Who may sign (man ssh-keygen, ALLOWED SIGNERS); default: RUN/allowed_signers")
    ] = None,
    unsigned_ok: Annotated[
        bool, typer.Option("--unsigned-ok", help="Also take what nobody known has signed, if it passes")
    ] = False,
    most_each: Annotated[
        int, typer.Option(help="Of an inbox: contributions of one key to judge, those refused before included", min=1)
    ] = MOST_EACH,
    device: Annotated[
        str | None, typer.Option(help="Where to measure: cpu, cuda; default: cuda if there is one")
    ] = None,
) -> None:
    """Judge each expert as a stranger's, in the run's quarantine, and add those that pass to the model.

    In this order: the order it was trained for, a bounded copy (regular files only, no links), the card held to the
    order field by field, the header of the weights, their values, the error on data no island has seen (with and
    without the condition, in every band of t, against neighbouring clusters), and what the model paints with it.
    Nothing of it is believed. docs/trust.md says what this finds, and what it cannot.

    An expert of any order that the run ever gave out is welcome. Whoever serves its cluster stays unless the newcomer
    is better by a margin (of a newer order: not worse by it), or --replace. What is refused stays in RUN/quarantine
    with the reasons; one refusal does not stop the others, and the exit code is then 2.

    Where the run has an allowed_signers file, and always with --inbox, an expert must be signed with a key of it.
    Whoever it names is credited; no name in a contribution is ever shown. Of an inbox each key gets --most-each
    contributions judged, and the rest is left there; what was refused before counts until you remove it.

    Examples:

      atoll admit from-alice/ from-bob/ --out runs/flowers

      atoll admit --inbox --out runs/flowers

      atoll admit s3://bucket/inbox/carol/03 --out runs/flowers --device cuda
    """
    run = clean_run(out)
    places = list(contributions or ())
    allowance = None
    if inbox or inbox_at is not None:
        allowance = Allowance(run, most_each)
        places += [str(place) for place in inbox_of(run, inbox_at)]
        if not places:
            console.print("nothing has come in")
            return
    if not places:
        raise UserError("admit: name expert folders, or use --inbox for all that came in")
    known = True if unsigned_ok else (False if inbox or inbox_at is not None else None)
    refused, left = [], []
    with progress() as display:
        for number, place in enumerate(places):
            display("checking and measuring", number, len(places))
            try:
                check_finished(place)
                tell(
                    admit_one(
                        run,
                        place,
                        replace=replace,
                        again=again,
                        device=device,
                        signers=signers,
                        unsigned_ok=known,
                        allowance=allowance,
                    )
                )
            except HadTheirShare as waiting:
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
        judged = len(places) - len(left)
        others = "" if len(refused) == judged else "; the others are in"
        raise UserError(f"{len(refused)} of {judged} were not admitted, for the reasons above{others}")


def tell(result: Admission) -> None:
    member, score = result.member, result.member.val_loss
    measured = "" if score is None else f", error {score.inside:.4f} inside, a Gaussian {score.gaussian:.4f}"
    state = "already admitted" if result.already else "admitted"
    if result.incumbent is not None and not result.already:
        state += (
            f", but {result.incumbent} goes on serving (the newcomer is not better by a margin; --replace seats it)"
        )
    line = (
        f"{state}: cluster {member.cluster}, {plain(member.objective)}{measured} -> [bold]{plain(member.path)}[/bold]"
    )
    by = "" if member.contributor is None else f", by {plain(member.contributor)}"
    if result.copied_by is not None:
        by += f"; {plain(result.copied_by)} sent the same, and is credited, too"
    console.print(f"{line}{by}", soft_wrap=True)
