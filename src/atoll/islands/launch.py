"""Run islands on this machine: each an operating-system process of its own, in a folder of its own.

What an island is handed is what a contributor would download: its order and its cluster's shards, in an inbox.
Processes share no memory and return nothing; they leave files.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch

from ..artifacts import MANIFEST, STATE, UNLISTED, Artifact, Store, UserError, find, link, verify_file
from ..models.accounting import account
from ..training.execution import named_or_best
from ..training.machines import free_memory_gib, usable_cores
from ..training.memory import footprint, plain_execution
from .initialization import place_of_init
from .order import Order, read_order
from .train import fetch

Progress = Callable[[str, int, int], None]  # (island, images, total)


@dataclass(frozen=True)
class Island:
    """One order that is trained here: where it lies, where its expert goes, and where its errors are written."""

    name: str
    order: str | Path
    expert: Path
    errors: Path
    images: int
    arguments: tuple[str, ...] = ()  # of `atoll train`, besides the usual

    @property
    def done(self) -> bool:
        return find(self.expert) is not None


def hand_out(run: Store, order_name: str, folder: Path, orders: str = "orders") -> Island:
    """Put one order, its shards and the expert it begins from into `folder/inbox`, laid out as in the run, all checked.

    Nobody writes to a shard, so those of the run serve, under a second name: nothing is copied on one file system.
    """
    order, _ = read_order(Artifact.open(run.child(orders), "orders").file(f"{order_name}.json"))
    inbox = folder / "inbox"
    for ref in order.shards:
        target = inbox / ref.path
        if target.is_file():
            verify_file(target, ref.sha256)
        else:
            link(fetch(run, ref.path, ref.sha256), target)
    if order.init is not None:
        init = Artifact.open(place_of_init(order, run))
        for name in init.names():
            link(init.file(name), inbox / order.init.path / name)
        Store.at(inbox).child(*order.init.path.split("/")).write(MANIFEST, init.manifest.to_bytes())
    Store.at(inbox).child("orders").write(f"{order_name}.json", order.to_bytes())
    place = inbox / "orders" / f"{order_name}.json"
    return Island(order_name, place, folder / "expert", folder / "errors.log", order.training.images)


def several(orders: Sequence[str], out: Path, arguments: Sequence[str] = ()) -> list[Island]:
    """Orders to be trained side by side: each expert goes to a folder of `out` that has the order's name.

    What `orders/*.json` takes along, the list of the orders and where they were made, is left aside.
    """
    islands: list[Island] = []
    for place in (place for place in orders if place.rpartition("/")[2] not in UNLISTED):
        order, _ = read_order(place)
        if order.name in {island.name for island in islands}:
            raise UserError(f"{place}: a second order {order.name}; train orders of one name into different --out")
        errors = out / "errors" / f"{order.name}.log"
        where = place if "://" in place else Path(place).resolve()
        expert = (out / order.name).resolve()
        islands.append(Island(order.name, where, expert, errors, order.training.images, tuple(arguments)))
    return islands


def places_for(islands: Sequence[Island], device: str | None) -> list[str]:
    """Where orders are trained at the same time: one on every GPU, since two on one would take turns; on a CPU one on
    every core, since each uses one thread, as long as memory holds them all.
    """
    name = named_or_best(device)
    if name == "cuda":
        return [f"cuda:{number}" for number in range(torch.cuda.device_count())]
    if torch.device(name).type != "cpu":
        return [name]
    waiting = [read_order(island.order)[0] for island in islands if not island.done]
    needed = [needs(order) for order in waiting]
    room = int(free_memory_gib() / max(needed, default=1.0))
    return [name] * max(1, min(usable_cores(), room))


def needs(order: Order) -> float:
    """GiB that training an order takes on a CPU, the interpreter and its libraries included."""
    cost, batch = account(order.architecture), order.training.batch
    return footprint(cost, plain_execution(cost, batch, "cpu"), batch)


def run_islands(
    islands: Sequence[Island],
    *,
    places: Sequence[str],
    checkpoint_seconds: float = 10.0,
    on_progress: Progress | None = None,
) -> None:
    """Train every island that has no expert yet, one at a time on each of `places`; returns when all have one.

    If this process dies, its islands die with it (they are tethered to a pipe), and the same call goes on. If it is
    interrupted they are told to save first. One that fails ends the others in the same way.
    """
    waiting = [island for island in islands if not island.done]
    free = list(places)
    running: dict[Island, tuple[str, subprocess.Popen[bytes]]] = {}
    try:
        while waiting or running:
            while waiting and free:
                island, place = waiting.pop(0), free.pop(0)
                running[island] = place, start(island, checkpoint_seconds, place)
            time.sleep(0.2)
            for island, (place, process) in list(running.items()):
                if on_progress is not None:
                    on_progress(island.name, images_seen(island), island.images)
                if process.poll() is not None:
                    del running[island]
                    free.append(place)
                    check_exit(island, process.returncode)
    finally:
        stop([process for _, process in running.values()])


def over_all(islands: Sequence[Island], show: Callable[[int, int], None]) -> Progress:
    """Progress of each island as one number over the images of all."""
    seen = {island.name: island.images if island.done else 0 for island in islands}
    total = sum(island.images for island in islands)

    def on_progress(name: str, images: int, _: int) -> None:
        seen[name] = images
        show(sum(seen.values()), total)

    return on_progress


def stop(processes: Sequence[subprocess.Popen[bytes]], patience: float = 20.0) -> None:
    """Let islands save what they have, and end those that do not."""
    for process in processes:
        process.terminate()
    until = time.monotonic() + patience
    for process in processes:
        try:
            process.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def start(island: Island, checkpoint_seconds: float, device: str) -> subprocess.Popen[bytes]:
    """The real verb, in a folder of its own, with its own error log."""
    command = [sys.executable, "-m", "atoll", "train", str(island.order), "--out", str(island.expert), "--quiet"]
    command += ["--checkpoint-seconds", str(checkpoint_seconds), "--tethered", "--device", device, *island.arguments]
    island.errors.parent.mkdir(parents=True, exist_ok=True)
    # the island sets its own thread count; libraries that start theirs at import must not take all cores
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with island.errors.open("wb") as errors:
        return subprocess.Popen(
            command,
            cwd=island.errors.parent,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            env=environment,
        )


def check_exit(island: Island, code: int) -> None:
    if code != 0 or not island.done:
        lines = island.errors.read_text(errors="replace").strip().splitlines()
        reason = lines[-1].removeprefix("atoll: ") if lines else f"exit code {code}"
        raise UserError(f"island {island.name} failed: {reason} (all of it in {island.errors})")


def images_seen(island: Island) -> int:
    """How far an island is."""
    return logged_images(island.expert)


def logged_images(expert: Path) -> int:
    """How many images an unfinished expert has seen, from the last line of its log that says so."""
    try:
        lines = (expert / "log.jsonl").read_text().splitlines()
    except FileNotFoundError:
        return 0  # not started yet
    for line in reversed(lines):
        try:
            return int(json.loads(line)["images"])
        except (KeyError, ValueError):
            continue  # another event, or a line half written
    return 0


def check_finished(place: str) -> None:
    """Refuse the folder of a training that is not at its end, and say how far it is.

    It may be a stranger's: nothing in it is read, and names of checkpoints are numbers or nothing.
    """
    expert = Path(place)
    if not (expert / STATE).is_dir() or find(expert) is not None:
        return
    saved = [int(path.stem) for path in islice((expert / STATE).glob("*.safetensors"), 100) if path.stem.isdecimal()]
    raise UserError(
        f"{expert}: is not finished, its last checkpoint is after {max(saved, default=0):,} images; "
        "give its `atoll train` command again to go on"
    )
