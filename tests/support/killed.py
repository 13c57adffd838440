"""Commands in processes that can be killed at any moment, and what they leave on the disk."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
from collections.abc import Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path

from atoll.artifacts import sha256_file

# forked from a server that has imported everything: all moments are moments of work, and none of imports
COMMANDS = ("prepare", "partition", "plan", "train", "admit", "router", "ensemble", "sample", "evaluate", "distill")
LATER = ("torch._dynamo", "sklearn.datasets", "sklearn.linear_model", "sklearn.metrics", "sklearn.model_selection")
# may hold times and places, or what an admission drew that nobody can repeat
UNLISTED = {"provenance.json", "log.jsonl", "report.html", "judgement.json", "sheet.png"}
SOON = 0.15  # seconds


def start(arguments: Sequence[str], folder: Path) -> BaseProcess:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*(f"atoll.cli.{name}" for name in COMMANDS), *LATER])
    process = context.Process(target=run_command, args=(list(arguments), str(folder)))
    process.start()
    return process


def run_command(arguments: list[str], folder: str) -> None:
    """`atoll` with these arguments in a folder, what it prints in a file there."""
    os.chdir(folder)
    with open("printed.txt", "ab", buffering=0) as printed:
        os.dup2(printed.fileno(), 1)
        os.dup2(printed.fileno(), 2)
    from atoll.cli import main

    main(arguments)


def finish(arguments: Sequence[str], folder: Path) -> float:
    """Run a command to its end; how long it took, in seconds."""
    began = time.monotonic()
    process = start(arguments, folder)
    process.join()
    assert process.exitcode == 0, f"atoll {' '.join(arguments)}: {(folder / 'printed.txt').read_text()[-2000:]}"
    return time.monotonic() - began


def kill(arguments: Sequence[str], folder: Path, duration: float, numbers: random.Random) -> bool:
    """Kill a command at a random moment; False if it was done before.

    Half of the moments are any of its duration, half come soon after it has changed something on the disk.
    """
    soon = numbers.random() < 0.5
    before = names(folder) if soon else set()
    process = start(arguments, folder)
    while soon and process.is_alive() and names(folder) <= before:
        time.sleep(0.001)
    time.sleep(numbers.random() * (SOON if soon else duration))
    process.kill()
    process.join()
    assert process.exitcode in (0, -signal.SIGKILL), (folder / "printed.txt").read_text()[-2000:]
    return process.exitcode != 0


def names(folder: Path) -> set[str]:
    """Everything below a folder, hidden or not, but for what the commands printed."""
    found = {  # not by rglob, which does not bear folders that go away meanwhile
        os.path.relpath(os.path.join(place, name), folder)
        for place, folders, files in os.walk(folder)
        for name in [*folders, *files]
    }
    return found - {"printed.txt"}


def contents(folder: Path) -> dict[str, str]:
    """Digest of every file below a folder; only that it is there, where it may hold times and places."""
    files = (p for p in folder.rglob("*") if p.is_file() and p.name != "printed.txt")
    return {p.relative_to(folder).as_posix(): "" if p.name in UNLISTED else sha256_file(p) for p in files}
