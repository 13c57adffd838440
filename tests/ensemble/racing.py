"""What each of many processes does to one ensemble at the same moment."""

from __future__ import annotations

import multiprocessing
import os
from itertools import pairwise
from multiprocessing.synchronize import Barrier

from atoll.artifacts import Store, sha256_bytes
from atoll.ensemble.changes import begun, change_ensemble
from atoll.ensemble.versions import History, Reference, Version

PATIENCE = 240.0  # seconds


def race(url: str, processes: int, rounds: int) -> None:
    """Let many processes change one ensemble at once, `rounds` times; raise if one of them did not end well."""
    # forked from a server that has imported what they need: torch takes seconds, times sixteen
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["atoll.ensemble.changes", "s3fs"])
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
        add_orders(run, f"orders-{who}-{number}")


def add_orders(run: Store, name: str) -> Version:
    """A change that is seen in every later version unless somebody lost it."""
    named = Reference(path=name, digest=sha256_bytes(name.encode()))

    def change(now: Version | None) -> Version:
        version = begun(run, now)
        return version.model_copy(update={"orders": tuple(dict.fromkeys([*version.orders, named]))})

    return change_ensemble(run, change, name)


def check_nothing_is_lost(url: str, processes: int, rounds: int) -> None:
    """Every change is a version of its own, in one unbroken chain, and still there in the last."""
    history = History.of(Store.at(url))
    chain = history.chain()
    expected = {f"orders-{who}-{number}" for who in range(processes) for number in range(rounds)}
    assert not history.unused
    assert [version.version for version in chain] == list(range(len(expected) + 1, 0, -1))
    assert {version.change for version in chain[:-1]} == expected
    for newer, older in pairwise(chain):
        added = [reference.path for reference in newer.orders if reference not in older.orders]
        assert added == [newer.change]
    assert {reference.path for reference in chain[0].orders} == expected | {"orders"}
    assert Store.at(url).read("ensemble.json") == chain[0].to_bytes(), "the copy is of the newest"
