"""Run islands on this machine: each a process of `atoll train` in a folder of its own.

An island gets what a contributor would download: its work order and its cluster's shards, in an inbox. Processes share
no memory and return nothing; they leave files.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ..artifacts import MANIFEST, STATE, UNLISTED, Artifact, Store, UserError, find, link, verify_file
from ..models.accounting import account
from ..training.compute import best_device
from ..training.memory import footprint, free_memory_gib, host_compute, usable_cores
from .initialization import place_of_init
from .order import Order, read_order
from .train import fetch

PATIENCE = 20.0  # seconds for islands to save when they are stopped


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

    Shards of the run get a second name there: nothing is copied on one file system.
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
        Store.at(inbox / order.init.path).write(MANIFEST, init.manifest.to_bytes())
    place = inbox / "orders" / f"{order_name}.json"
    Store.at(place.parent).write(place.name, order.to_bytes())
    return Island(order_name, place, folder / "expert", folder / "errors.log", order.training.images)


def several(orders: Sequence[str], out: Path, arguments: Sequence[str] = ()) -> list[Island]:
    """Orders to be trained side by side, each into a folder of `out` with the order's name; `orders/*.json` will do."""
    islands: dict[str, Island] = {}
    for place in (place for place in orders if place.rpartition("/")[2] not in UNLISTED):
        order, _ = read_order(place)
        if order.name in islands:
            raise UserError(f"{place}: a second order {order.name}; train orders of one name into different --out")
        where = place if "://" in place else Path(place).resolve()
        expert, errors = (out / order.name).resolve(), out / "errors" / f"{order.name}.log"
        islands[order.name] = Island(order.name, where, expert, errors, order.training.images, tuple(arguments))
    return list(islands.values())


def places_for(islands: Sequence[Island], device: str | None) -> list[str]:
    """Devices for orders trained at the same time: one on every GPU; on a CPU one on every core that memory is for."""
    name = best_device(device)
    if name == "cuda":
        return [f"cuda:{number}" for number in range(torch.cuda.device_count())]
    if torch.device(name).type != "cpu":
        return [name]
    needed = [needs(read_order(island.order)[0]) for island in islands if not island.done]
    room = int(free_memory_gib() / max(needed, default=1.0))
    return [name] * max(1, min(usable_cores(), room))


def needs(order: Order) -> float:
    """GiB that training an order takes on a CPU."""
    cost, batch = account(order.architecture), order.training.batch
    return footprint(cost, host_compute(cost, batch, "cpu"), batch)


def run_islands(
    islands: Sequence[Island],
    *,
    places: Sequence[str],
    checkpoint_seconds: float = 10.0,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Train every island that has no expert yet, one at a time on each of `places`; returns when all have one.

    `on_progress` is called with the images that all have seen, and shall see. Islands die with this process (they are
    tethered to a pipe), and the same call resumes. Interrupted, they save first; one that fails ends the others so.
    """
    waiting, free = [island for island in islands if not island.done], list(places)
    running: dict[Island, tuple[str, subprocess.Popen[bytes]]] = {}
    total = sum(island.images for island in islands)
    try:
        while waiting or running:
            while waiting and free:
                island, place = waiting.pop(0), free.pop(0)
                running[island] = place, start(island, checkpoint_seconds, place)
            time.sleep(0.2)
            left = [*waiting, *running]
            seen = sum(logged_images(island.expert) if island in left else island.images for island in islands)
            on_progress(seen, total)
            for island, (place, process) in list(running.items()):
                if process.poll() is not None:
                    del running[island]
                    free.append(place)
                    check_exit(island, process.returncode)
        on_progress(total, total)
    finally:
        stop([process for _, process in running.values()])


def start(island: Island, checkpoint_seconds: float, device: str) -> subprocess.Popen[bytes]:
    """The real command, in a folder of its own, with its own error log."""
    command = [sys.executable, "-m", "atoll", "train", str(island.order), "--out", str(island.expert), "--quiet"]
    command += ["--checkpoint-seconds", str(checkpoint_seconds), "--tethered", "--device", device, *island.arguments]
    island.errors.parent.mkdir(parents=True, exist_ok=True)
    # the island sets its own thread count; libraries that start theirs at import must not take all cores
    environment, folder, pipe = {**os.environ, "OMP_NUM_THREADS": "1"}, island.errors.parent, subprocess.PIPE
    with island.errors.open("wb") as errors:
        return subprocess.Popen(
            command, cwd=folder, stdin=pipe, stdout=subprocess.DEVNULL, stderr=errors, env=environment
        )


def stop(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Let islands save what they have, and end those that do not."""
    for process in processes:
        process.terminate()
    until = time.monotonic() + PATIENCE
    for process in processes:
        try:
            process.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def check_exit(island: Island, code: int) -> None:
    if code != 0 or not island.done:
        lines = island.errors.read_text(errors="replace").strip().splitlines()
        reason = lines[-1].removeprefix("atoll: ") if lines else f"exit code {code}"
        raise UserError(f"island {island.name} failed: {reason} (all of it in {island.errors})")


def logged_images(expert: Path) -> int:
    """How many images an unfinished expert has seen, from the last line of its log that tells."""
    log = expert / "log.jsonl"
    for line in reversed(log.read_text().splitlines() if log.exists() else []):
        try:
            return int(json.loads(line)["images"])
        except (KeyError, ValueError):
            continue  # another event, or a line half written
    return 0


def check_finished(place: str) -> None:
    """Refuse the folder of a training that is not at its end. Nothing in it is read: its maker may be untrusted."""
    expert = Path(place)
    if (expert / STATE).is_dir() and find(expert) is None:
        raise UserError(f"{expert}: is not finished; give its `atoll train` command again to resume")
