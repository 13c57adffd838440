"""atoll train: one order in, one expert out."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Annotated

import typer

from ..artifacts import UserError, find
from ..islands import train as island
from .bars import bars, console


def train(
    order: Annotated[str, typer.Argument(help="The order file, on disk or an fsspec URL")],
    out: Annotated[str, typer.Option(help="Folder for the expert; work in progress lies in its state/")],
    data: Annotated[str | None, typer.Option(help="Folder with the shards, if not the order's own run")] = None,
    start: Annotated[str | None, typer.Option(help="Train on from this expert's weights (see atoll convert)")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, mps; default: cuda if there is one")] = None,
    checkpoint_seconds: Annotated[float, typer.Option(help="Save the state this often")] = 60.0,
    quiet: Annotated[bool, typer.Option(help="Print errors only")] = False,
    tethered: Annotated[bool, typer.Option(hidden=True, help="End when standard input closes")] = False,
) -> None:
    """Train the expert that one work order asks for. Run it again to go on after a stop of any kind.

    Examples:

      atoll train orders/03.json --out my-expert

      atoll train 03.json --data ~/cluster-03 --out my-expert --device cuda:1

      atoll train 03.json --start converted-dit --out my-expert
    """
    folder = Path(out)
    if "://" in out or folder.is_file():
        raise UserError(f"--out {out}: give a local folder; send the finished one where it belongs")
    if tethered:
        threading.Thread(target=_end_with_parent, daemon=True).start()
    if find(folder) is not None:
        island.train(order, folder, data=data, start=start)  # checks that it is this order's
        if not quiet:
            console.print(f"already there: [bold]{out}[/bold]")
        return
    with bars(quiet=quiet) as bar:
        artifact = island.train(
            order,
            folder,
            data=data,
            start=start,
            device=device,
            checkpoint_seconds=checkpoint_seconds,
            on_progress=lambda images, total: bar("training", images, total),
        )
    if not quiet:
        console.print(f"expert {artifact.digest[:12]} in [bold]{out}[/bold]: send this folder back (not its state/)")


def _end_with_parent() -> None:
    """An island started by another process must not outlive it: the pipe closes when that process dies."""
    while os.read(0, 1024):  # not sys.stdin, whose lock would be held when the interpreter ends
        pass
    os._exit(1)
