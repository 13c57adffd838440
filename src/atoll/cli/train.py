"""atoll train: one order in, one expert out."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from ..artifacts import UserError, find
from ..islands import train as island
from ..islands.launch import over_all, places_for, run_islands, several
from ..training.resources import Resources, parse_memory
from ..training.team import leads_its_team
from .progress import console, progress
from .settings import parse_overrides
from .training_options import CheckpointSeconds, Device, Memory


def train(
    orders: Annotated[list[str], typer.Argument(help="The order file, on disk or an fsspec URL; or several of them")],
    out: Annotated[
        str, typer.Option(help="Folder for the expert; work in progress lies in its state/. Of several orders: for all")
    ],
    data: Annotated[str | None, typer.Option(help="Folder with the shards, if not the order's own run")] = None,
    init: Annotated[str | None, typer.Option(help="Begin from the weights of this expert (see atoll convert)")] = None,
    device: Device = None,
    memory: Memory = None,
    overrides: Annotated[
        list[str], typer.Option("--set", help="How to compute: micro_batch=16, precision=float32, compiling=none, ...")
    ] = [],  # noqa: B006
    checkpoint_seconds: CheckpointSeconds = None,
    sheets: Annotated[bool, typer.Option(help="Show in OUT/sheets what it paints at every tenth of the budget")] = True,
    tensorboard: Annotated[str | None, typer.Option(help="Write losses and rate for TensorBoard here")] = None,
    at_once: Annotated[
        int | None, typer.Option(help="Of several orders, how many (default: one per GPU, or per core)", min=1)
    ] = None,
    key: Annotated[str | None, typer.Option(help="Sign the expert with this SSH key, or its .pub and an agent")] = None,
    quiet: Annotated[bool, typer.Option(help="Print errors only")] = False,
    tethered: Annotated[bool, typer.Option(hidden=True, help="End when standard input closes")] = False,
) -> None:
    """Train the expert that one work order asks for. Run it again to go on after a stop of any kind.

    Several orders are trained side by side, as many as there are GPUs or cores,
    each into a folder of OUT that has its name: OUT/03.

    On a GPU it chooses by itself how to make the best of the memory, and says
    what it chose; --memory and --set change that without a new order. Under
    torchrun several GPUs train one expert together. What it would paint so far
    is in OUT/sheets/. See docs/training.md.

    provenance.json and log.jsonl in OUT name this machine, its times and the
    command; nothing needs them, so leave them out if you would rather not say.

    Examples:

      atoll train orders/03.json --out my-expert

      atoll train 03.json --data ~/cluster-03 --out my-expert --memory 20GB

      atoll train 03.json --out it --key ~/.ssh/id_ed25519

      atoll train 03.json --init converted --out it --set precision=float32

      atoll train orders/*.json --out experts

      torchrun --standalone --nproc-per-node 4 -m atoll train 03.json --out it
    """
    folder = Path(out)
    if "://" in out or folder.is_file():
        raise UserError(f"--out {out}: give a local folder; send the finished one where it belongs")
    if len(orders) > 1:
        train_several(
            orders,
            folder,
            {"--data": data, "--memory": memory},
            {"--init": init, "--tensorboard": tensorboard},
            [part for text in overrides for part in ("--set", text)] + ([] if sheets else ["--no-sheets"]),
            device=device,
            at_once=at_once,
            checkpoint_seconds=checkpoint_seconds,
            quiet=quiet,
        )
        return
    if at_once is not None:
        raise UserError("--at-once: has no meaning with one order; leave it out")
    (order,) = orders
    if tethered:
        threading.Thread(target=_end_with_parent, daemon=True).start()
    there = find(folder) is not None
    limit = None if memory is None else parse_memory(memory)
    leads = leads_its_team()  # of several processes that train together one talks
    with progress(quiet=quiet or there or not leads, tensorboard=tensorboard if leads else None) as display:
        artifact = island.train(
            order,
            folder,
            data=data,
            init=init,
            resources=Resources(device, limit, parse_overrides(overrides)),
            checkpoint_seconds=checkpoint_seconds,
            sheets=sheets,
            watch=display.training(),
        )
    if key is not None and artifact is not None:
        from ..exchange.signed import sign_contribution  # an island that signs nothing loads nothing of the exchange

        sign_contribution(folder, key)
    if quiet or not leads or artifact is None:
        return
    if there:
        console.print(f"already there: [bold]{out}[/bold]", soft_wrap=True)
    else:
        line = f"expert {artifact.digest[:12]} in [bold]{out}[/bold]: send this folder back"
        console.print(line, soft_wrap=True)


def _end_with_parent() -> None:
    """An island started by another process must not outlive it: the pipe closes when that process dies."""
    while os.read(0, 1024):  # not sys.stdin, whose lock would be held when the interpreter ends
        pass
    os._exit(1)


def train_several(
    orders: list[str],
    out: Path,
    passed_on: Mapping[str, str | None],
    of_one_only: Mapping[str, str | None],
    switches: list[str],
    *,
    device: str | None,
    at_once: int | None,
    checkpoint_seconds: float | None,
    quiet: bool,
) -> None:
    """Every order in a process of its own, with one bar over all of their images."""
    for option, value in of_one_only.items():
        if value is not None:
            raise UserError(f"{option}: is of one order; train them one by one, or leave it out")
    absolute = {"--data": passed_on["--data"] and str(Path(passed_on["--data"]).resolve())}
    options = [(name, absolute.get(name) or value) for name, value in passed_on.items() if value is not None]
    islands = several(orders, out, [*(part for option in options for part in option if part), *switches])
    places = places_for(islands, device)
    if at_once is not None:
        places = [places[number % len(places)] for number in range(at_once)]
    there = sum(island.done for island in islands)
    with progress(quiet=quiet) as display:
        watch = over_all(islands, lambda done, total: display(f"{len(islands)} orders", done, total))
        run_islands(islands, places=places, checkpoint_seconds=checkpoint_seconds or 60.0, on_progress=watch)
    if not quiet:
        said = f", {there} of them before" if there else ""
        console.print(f"{len(islands)} experts in [bold]{out}[/bold]{said}: send these folders back", soft_wrap=True)
