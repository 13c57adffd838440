"""atoll train: one order in, one expert out."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Annotated

import typer

from ..artifacts import find
from ..islands import train as island
from ..islands.launch import places_for, run_islands, several
from ..training.compute import ComputeConfig
from ..training.distributed import is_main
from ..training.resources import Resources
from . import options
from .options import Settings, refuse, with_settings
from .progress import progress
from .tables import print_line


@with_settings(ComputeConfig)
def train(
    orders: Annotated[list[str], typer.Argument(help="Order file or URL, or several of them.")],
    *,
    out: options.WorkFolder,
    data: Annotated[str | None, typer.Option(help="Folder with the shards (default: the order's own run).")] = None,
    init: Annotated[str | None, typer.Option(help="Begin from the weights of this expert.")] = None,
    device: options.Device = None,
    memory: options.Memory = None,
    settings: Settings,
    checkpoint_seconds: options.CheckpointSeconds = None,
    previews: Annotated[bool, typer.Option(help="Write sample grids to OUT/sheets, ten in all.")] = True,
    tensorboard: options.Tensorboard = None,
    key: Annotated[str | None, typer.Option(help="SSH key, or its .pub with an agent, to sign the expert.")] = None,
    quiet: options.Quiet = False,
    tethered: Annotated[bool, typer.Option("--tethered", help="End when standard input closes.", hidden=True)] = False,
) -> None:
    """Train the expert of one work order. The same command resumes after a stop of any kind.

    Several orders train side by side, one per GPU or core, each into a folder of OUT with its name.
    On a GPU the memory settings are chosen and printed; --memory and --set change them.
    provenance.json and log.jsonl in OUT name this machine; leave them out if you prefer.

    \b
    Examples:
      atoll train orders/03.json --out my-expert
      atoll train 03.json --data ~/cluster-03 --out my-expert --memory 20GB
      atoll train 03.json --out it --key ~/.ssh/id_ed25519
      atoll train 03.json --init converted --out it --set precision=float32
      atoll train orders/*.json --out experts
      torchrun --standalone --nproc-per-node 4 -m atoll train 03.json --out it
    """
    settings.show(settings.over(ComputeConfig()), "how to compute; none: chosen on the machine")
    if len(orders) > 1:
        refuse({"--init": init, "--tensorboard": tensorboard, "--key": key}, "several orders")
        words = [] if data is None else ["--data", str(Path(data).resolve())]
        words += [] if memory is None else ["--memory", memory]
        words += [word for setting in settings.words for word in ("--set", setting)]
        words += [] if previews else ["--no-previews"]
        return train_several(orders, out, words, device, checkpoint_seconds or 60.0, quiet)
    if tethered:
        threading.Thread(target=end_with_parent, daemon=True).start()
    there = find(out) is not None
    leads = is_main()  # of several processes that train together one prints
    with progress(quiet=quiet or there or not leads, tensorboard=tensorboard if leads else None) as display:
        artifact = island.train(
            orders[0],
            out,
            data=data,
            init=init,
            resources=Resources(device, options.gib(memory), settings.changes),
            checkpoint_seconds=checkpoint_seconds,
            sheets=previews,
            watch=display.training(),
        )
    if key is not None and artifact is not None:
        from ..exchange.signed import sign_contribution  # an island that signs nothing loads nothing of the exchange

        sign_contribution(out, key)
    if leads and artifact is not None and not quiet:
        print_line(
            f"already there: {out}" if there else f"expert {artifact.digest[:12]} in {out}: send this folder back"
        )


def end_with_parent() -> None:
    """End with the process that started this one: the pipe closes when that process dies."""
    while os.read(0, 1024):  # not sys.stdin, whose lock would be held when the interpreter ends
        pass
    os._exit(1)


def train_several(
    orders: list[str], out: Path, words: list[str], device: str | None, seconds: float, quiet: bool
) -> None:
    """Every order in a process of its own, with one bar over all of their images."""
    islands = several(orders, out, words)
    there = sum(island.done for island in islands)
    with progress(quiet=quiet) as display:
        run_islands(
            islands,
            places=places_for(islands, device),
            checkpoint_seconds=seconds,
            on_progress=lambda done, total: display(f"training {len(islands)} orders", done, total),
        )
    if not quiet:
        before = f", {there} of them before" if there else ""
        print_line(f"{len(islands)} experts in {out}{before}: send these folders back")
