"""Many organizers at once, in real processes: on a disk and on an S3 server nothing is lost, or it is refused."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import ClassVar

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from racing import check_nothing_is_lost, race

from atoll.cli import main
from s3_servers import moto_bucket, upload

PROCESSES = 16
LONG = [pytest.mark.slow, pytest.mark.timeout(1500)]


def begun_run(planned: Path, place: Path) -> Path:
    """What a model needs to be named: manifests, orders and the first version."""
    wanted = ["data/manifest.json", "partition/manifest.json", "orders", "ensemble", "ensemble.json"]
    for name in wanted:
        for file in [planned / name] if (planned / name).is_file() else (planned / name).iterdir():
            target = place / file.relative_to(planned)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, target)
    return place


@pytest.mark.parametrize("rounds", [2, pytest.param(20, marks=LONG)])
def test_sixteen_processes_on_a_disk_lose_nothing(rounds: int, planned: Path, tmp_path: Path) -> None:
    run = begun_run(planned, tmp_path / "run")
    race(str(run), PROCESSES, rounds)
    check_nothing_is_lost(str(run), PROCESSES, rounds)
    assert not [path for path in run.rglob("*") if path.name.endswith(".tmp")]


@pytest.mark.parametrize(("processes", "rounds"), [(4, 3), pytest.param(PROCESSES, 20, marks=LONG)])
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
    begun = ["data/manifest.json", "partition/manifest.json"]
    for name in begun:
        Plain().pipe_file(f"/run/{name}", (planned / name).read_bytes())
    for command in (["plan", "dropbox://run/data"], ["ensemble", "dropbox://run", "--route", "top-1"]):
        with pytest.raises(SystemExit) as exit_:
            main(command)
        assert exit_.value.code == 2
        line = capsys.readouterr().err
        assert "cannot create a file only if it is absent, so two organizers at once would undo each other" in line
        assert line.count("\n") == 1
    assert sorted(Plain().find("/run")) == [f"/run/{name}" for name in begun]
