"""atoll admit: let a contribution into the ensemble."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..artifacts import UserError
from ..ensemble.versions import clean_run, open_ensemble
from ..exchange.admit import Admission
from ..exchange.admit import admit as admit_one
from ..islands.launch import check_finished
from .bars import bars, console


def admit(
    contributions: Annotated[list[Path], typer.Argument(help="Expert folders as they came back")],
    out: Annotated[str, typer.Option(help="The run that gave the orders")],
) -> None:
    """Check each expert as a stranger's, measure it on data no island has seen, and add it to the model.

    Refused: another latent space or partition, wrong shapes, values that are not finite, digests that do not
    match, files no expert has, an error on the holdout far above a Gaussian's (the order says how far). Nothing is
    written for a refused expert; the others are admitted all the same, and the exit code is 2.

    An expert of any order that the run ever gave out is welcome, also after late data: it is measured on the
    newest holdout, and serves unless one of a newer order does and is no worse.

    Example:

      atoll admit from-alice/ from-bob/ --out runs/flowers
    """
    run = clean_run(out)
    open_ensemble(run)
    refused = []
    with bars("experts") as show:
        for number, contribution in enumerate(contributions):
            show("checking and measuring", number, len(contributions))
            try:
                check_finished(contribution)
                tell(admit_one(run, contribution))
            except UserError as error:
                refused.append(str(error))
                if len(contributions) > 1:
                    typer.echo(f"atoll: {error}", err=True)
    if refused:
        several = f"{len(refused)} of {len(contributions)} were not admitted, for the reasons above; the others are in"
        raise UserError(several if len(contributions) > 1 else refused[0])


def tell(result: Admission) -> None:
    member, score = result.member, result.member.yardsticks
    measured = "" if score is None else f", error {score.inside:.4f} inside, a Gaussian {score.gaussian:.4f}"
    state = "already admitted" if result.already else "admitted"
    if result.incumbent is not None:
        state += f", but {result.incumbent} goes on serving (of a newer order, and no worse)"
    console.print(f"{state}: cluster {member.cluster}, {member.objective}{measured} -> [bold]{member.path}[/bold]")
