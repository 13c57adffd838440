"""What each of many processes does to one ensemble at the same moment."""

from __future__ import annotations

import multiprocessing
import os
from itertools import pairwise
from multiprocessing.synchronize import Barrier

from atoll.artifacts import Store, sha256_bytes
from atoll.registry.changes import begun, change_ensemble
from atoll.registry.versions import History, Reference, Version

PATIENCE = 1200.0  # seconds


def race(url: str, processes: int, rounds: int) -> None:
    """Let many processes change one ensemble at once, `rounds` times; raise if one of them did not end well."""
    # forked from a server that has imported what they need: torch takes seconds, times sixteen
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["atoll.registry.changes", "s3fs"])
    start = context.Barrier(processes)
    settings = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    arguments = [(url, who, rounds, start, settings) for who in range(processes)]
    started = [context.Process(target=change_in_rounds, args=each, daemon=True) for each in arguments]
    for process in started:
        process.start()
    for process in started:
        process.join(PATIENCE)
        assert process.exitcode == 0, f"exit code {process.exitcode}"


def change_in_rounds(url: str, who: int, rounds: int, start: Barrier, settings: dict[str, str]) -> None:
    os.environ.update(settings)
    run = Store.at(url)
    for number in range(rounds):
        start.wait(PATIENCE)
        put(run, f"orders-{who}", number)


def put(run: Store, path: str, number: int) -> Version:
    """Name something of one's own anew: every later version has it, unless somebody lost it."""

    def change(now: Version | None) -> Version:
        version = begun(run, now)
        others = [reference for reference in version.orders if reference.path != path]
        mine = Reference(path=path, digest=sha256_bytes(f"{path} {number}".encode()))
        return version.model_copy(update={"orders": (*others, mine)})

    return change_ensemble(run, change, f"{path} {number}")


def check_nothing_is_lost(url: str, processes: int, rounds: int) -> None:
    """Every change is a version of its own, in one unbroken chain, and each keeps what all before it did."""
    history = History.of(Store.at(url))
    chain = history.chain()
    assert not history.unused
    assert [version.version for version in chain] == list(range(processes * rounds + 1, 0, -1))
    for newer, older in pairwise(chain):
        path, _, _ = newer.change.partition(" ")
        expected = {r.path: r.digest for r in older.orders} | {path: sha256_bytes(newer.change.encode())}
        assert {r.path: r.digest for r in newer.orders} == expected
    told = [version.change for version in chain[:-1]]
    for who in range(processes):  # each of a process's changes, in the order in which it made them
        assert [text for text in told if text.startswith(f"orders-{who} ")] == [
            f"orders-{who} {number}" for number in reversed(range(rounds))
        ]
    assert Store.at(url).read("ensemble.json") == chain[0].to_bytes(), "the copy is of the newest"
