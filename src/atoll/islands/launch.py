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
from pathlib import Path

from ..artifacts import MANIFEST, STATE, Artifact, Store, UserError, find, link, verify_file
from .order import read_order
from .start import place_of_start
from .train import fetch

Progress = Callable[[str, int, int], None]  # (island, images, total)


@dataclass(frozen=True)
class Island:
    """One island's folder: inbox/ is what it was handed, expert/ what it leaves."""

    name: str
    folder: Path
    order: Path
    images: int

    @property
    def expert(self) -> Path:
        return self.folder / "expert"

    @property
    def done(self) -> bool:
        return find(self.expert) is not None


def hand_out(run: Store, order_name: str, folder: Path, orders: str = "orders") -> Island:
    """Put one order, its shards and the expert it trains on into `folder/inbox`, laid out as in the run, all checked.

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
    if order.start is not None:
        start = Artifact.open(place_of_start(order, run))
        for name in start.names():
            link(start.file(name), inbox / order.start.path / name)
        Store.at(inbox).child(*order.start.path.split("/")).write(MANIFEST, start.manifest.to_bytes())
    Store.at(inbox).child("orders").write(f"{order_name}.json", order.to_bytes())
    return Island(order_name, folder, inbox / "orders" / f"{order_name}.json", order.training.images)


def run_islands(
    islands: Sequence[Island],
    *,
    parallel: int,
    device: str | None = None,
    checkpoint_seconds: float = 10.0,
    on_progress: Progress | None = None,
) -> None:
    """Train every island that has no expert yet, `parallel` at a time; returns when all have one.

    If this process dies, its islands die with it (they are tethered to a pipe), and the same call goes on.
    """
    waiting = [island for island in islands if not island.done]
    running: dict[Island, subprocess.Popen[bytes]] = {}
    try:
        while waiting or running:
            while waiting and len(running) < parallel:
                island = waiting.pop(0)
                running[island] = start(island, checkpoint_seconds, device)
            time.sleep(0.2)
            for island, process in list(running.items()):
                if on_progress is not None:
                    on_progress(island.name, images_seen(island), island.images)
                if process.poll() is not None:
                    del running[island]
                    check_exit(island, process.returncode)
    finally:
        for process in running.values():
            process.kill()
            process.wait()


def start(island: Island, checkpoint_seconds: float, device: str | None) -> subprocess.Popen[bytes]:
    """The real verb, in the island's own folder, with its own error log."""
    command = [sys.executable, "-m", "atoll", "train", str(island.order), "--out", str(island.expert), "--quiet"]
    command += ["--checkpoint-seconds", str(checkpoint_seconds), "--tethered"]
    command += [] if device is None else ["--device", device]
    island.folder.mkdir(parents=True, exist_ok=True)
    # the island sets its own thread count; libraries that start theirs at import must not take all cores
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with (island.folder / "errors.log").open("wb") as errors:
        return subprocess.Popen(
            command, cwd=island.folder, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=errors, env=environment
        )


def check_exit(island: Island, code: int) -> None:
    if code != 0 or not island.done:
        lines = (island.folder / "errors.log").read_text(errors="replace").strip().splitlines()
        reason = lines[-1] if lines else f"exit code {code}"
        raise UserError(f"island {island.name} failed: {reason} (all of it in {island.folder / 'errors.log'})")


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


def check_finished(expert: Path) -> None:
    """Refuse the folder of a training that is not at its end, and say how far it is."""
    if (expert / STATE).is_dir() and find(expert) is None:
        raise UserError(
            f"{expert}: is not finished, it has seen {logged_images(expert):,} images so far; "
            "give its `atoll train` command again to go on"
        )
