"""Many organizers at once, in real processes: on a disk and on an S3 server nothing is lost, or it is refused."""

from __future__ import annotations

import multiprocessing
import os
import shutil
from itertools import pairwise
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import ClassVar

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from atoll.artifacts import Store, sha256_bytes
from atoll.cli import main
from atoll.registry.changes import begun, change_ensemble
from atoll.registry.versions import Reference, Version
from runs import versions_of
from s3_servers import moto_bucket, upload

PROCESSES = 8
LONG = [pytest.mark.slow, pytest.mark.timeout(1500)]


def begun_run(planned: Path, place: Path) -> Path:
    """What a model needs to be named: manifests, orders and the first version."""
    for name in ("data/manifest.json", "partition/manifest.json", "orders", "ensemble"):
        for file in [planned / name] if (planned / name).is_file() else (planned / name).iterdir():
            target = place / file.relative_to(planned)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, target)
    return place


def race(url: str, processes: int, rounds: int) -> None:
    """Let many processes change one ensemble at once, `rounds` times; all of them end well."""
    # forked from a server that has imported what they need: torch takes seconds
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["atoll.registry.changes", "s3fs"])
    start = context.Barrier(processes)
    settings = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    arguments = [(url, who, rounds, start, settings) for who in range(processes)]
    started = [context.Process(target=change_in_rounds, args=each, daemon=True) for each in arguments]
    for process in started:
        process.start()
    for process in started:
        process.join(1200)
        assert process.exitcode == 0


def change_in_rounds(url: str, who: int, rounds: int, start: Barrier, settings: dict[str, str]) -> None:
    """Name something of one's own anew: every later version has it, unless somebody lost it."""
    os.environ.update(settings)
    run = Store.at(url)
    for number in range(rounds):
        start.wait(1200)
        mine = Reference(path=f"orders-{who}", digest=sha256_bytes(f"orders-{who} {number}".encode()))

        def change(now: Version | None, mine: Reference = mine) -> Version:
            others = [reference for reference in begun(run, now).orders if reference.path != mine.path]
            return begun(run, now).model_copy(update={"orders": (*others, mine)})

        change_ensemble(run, change, f"orders-{who} {number}")


def check_nothing_is_lost(url: str, processes: int, rounds: int) -> None:
    """Every change is a version of its own that keeps what all before it did."""
    chain = list(reversed(versions_of(Store.at(url))))
    assert [version.version for version in chain] == list(range(1, processes * rounds + 2))
    expected = {r.path: r.digest for r in chain[0].orders}
    for older, newer in pairwise(chain):
        assert newer.predecessor == older.digest()
        expected[newer.change.partition(" ")[0]] = sha256_bytes(newer.change.encode())
        assert {r.path: r.digest for r in newer.orders} == expected
    for who in range(processes):  # in the order in which it made them
        own = [version.change for version in chain if version.change.startswith(f"orders-{who} ")]
        assert own == [f"orders-{who} {number}" for number in range(rounds)]


@pytest.mark.parametrize("rounds", [2, pytest.param(20, marks=LONG)])
def test_many_processes_on_a_disk_lose_nothing(rounds: int, planned: Path, tmp_path: Path) -> None:
    run = begun_run(planned, tmp_path / "run")
    race(str(run), PROCESSES, rounds)
    check_nothing_is_lost(str(run), PROCESSES, rounds)
    assert not [path for path in run.rglob("*") if path.name.endswith(".tmp")]


@pytest.mark.parametrize(("processes", "rounds"), [(4, 2), pytest.param(16, 10, marks=LONG)])
def test_many_processes_on_s3_lose_nothing(processes: int, rounds: int, planned: Path, tmp_path: Path) -> None:
    with moto_bucket() as bucket:
        upload(begun_run(planned, tmp_path / "run"), f"{bucket}/run")
        race(f"{bucket}/run", processes, rounds)
        check_nothing_is_lost(f"{bucket}/run", processes, rounds)


def test_a_store_that_cannot_create_if_absent_is_refused_before_anything_is_written(
    planned: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Plain(MemoryFileSystem):
        """Its client looks first and writes then: two organizers would undo each other there."""

        protocol = "dropbox"
        store: ClassVar[dict[str, object]] = {}
        pseudo_dirs: ClassVar[list[str]] = [""]

        @classmethod
        def _strip_protocol(cls, path: str) -> str:
            return str(super()._strip_protocol(path.replace("dropbox://", "memory://")))

    fsspec.register_implementation("dropbox", Plain, clobber=True)
    there = ["data/manifest.json", "partition/manifest.json"]
    for name in there:
        Plain().pipe_file(f"/run/{name}", (planned / name).read_bytes())
    for command in (["plan", "dropbox://run/data"], ["ensemble", "dropbox://run", "--route", "top-1"]):
        with pytest.raises(SystemExit) as exit_:
            main(command)
        assert exit_.value.code == 2
        line = capsys.readouterr().err
        assert "cannot create a file only if it is absent, so two organizers at once would undo each other" in line
        assert line.count("\n") == 1
    assert sorted(Plain().find("/run")) == [f"/run/{name}" for name in there]
