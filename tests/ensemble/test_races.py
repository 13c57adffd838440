"""Many organisers at once, in real processes: on a disk and on an S3 server nothing is lost, or it is refused."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from racing import check_nothing_is_lost, put, race

from atoll.artifacts import Store, UserError
from runs import atoll
from s3_servers import moto_bucket, rclone_bucket, upload

PROCESSES = 16


def begun_run(planned: Path, place: Path) -> Path:
    """What a model needs to be named: manifests, orders and the first version."""
    wanted = ["data/manifest.json", "partition/manifest.json", "orders", "ensemble", "ensemble.json"]
    for name in wanted:
        for file in [planned / name] if (planned / name).is_file() else (planned / name).iterdir():
            target = place / file.relative_to(planned)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, target)
    return place


@pytest.mark.parametrize("rounds", [3, pytest.param(20, marks=pytest.mark.slow)])
def test_sixteen_processes_on_a_disk_lose_nothing(rounds: int, planned: Path, tmp_path: Path) -> None:
    run = begun_run(planned, tmp_path / "run")
    race(str(run), PROCESSES, rounds)
    check_nothing_is_lost(str(run), PROCESSES, rounds)
    assert not [path for path in run.rglob("*") if path.name.endswith(".tmp")]


@pytest.mark.parametrize(("processes", "rounds"), [(6, 3), pytest.param(PROCESSES, 20, marks=pytest.mark.slow)])
def test_many_processes_on_s3_lose_nothing(processes: int, rounds: int, planned: Path, tmp_path: Path) -> None:
    with moto_bucket() as bucket:
        upload(begun_run(planned, tmp_path / "run"), f"{bucket}/run")
        race(f"{bucket}/run", processes, rounds)
        check_nothing_is_lost(f"{bucket}/run", processes, rounds)
        assert not [name for name in Store.at(f"{bucket}/run").children() if name.startswith(".")], "a probe was left"


def test_a_store_that_ignores_conditions_is_refused_with_the_reason(planned: Path, tmp_path: Path) -> None:
    """rclone's server lets everybody create the same file: two organisers would undo each other there."""
    with rclone_bucket(tmp_path / "s3") as bucket:
        upload(begun_run(planned, tmp_path / "run"), f"{bucket}/run")
        run = Store.at(f"{bucket}/run")
        before = {path: path.read_bytes() for path in (tmp_path / "s3").rglob("*") if path.is_file()}
        with pytest.raises(UserError, match="let the same file be created twice") as caught:
            put(run, "orders-2", 0)
        assert "two organisers at once would undo each other" in str(caught.value)
        assert "\n" not in str(caught.value)
        process = atoll("ensemble", f"{bucket}/run", "--route", "top-1", check=False)
        assert process.returncode == 2
        assert f"{bucket}/run: this store cannot create a file only if it is absent" in process.stderr
        assert process.stderr.count("\n") == 1
        after = {path: path.read_bytes() for path in (tmp_path / "s3").rglob("*") if path.is_file()}
        assert after == before, "nothing is written there, and the probe is gone"
        assert "version 1" in atoll("ensemble", f"{bucket}/run").stdout, "but it can be read"


def test_plan_refuses_such_a_store_before_it_writes_orders(planned: Path, tmp_path: Path) -> None:
    with rclone_bucket(tmp_path / "s3") as bucket:
        for part in ("data", "partition"):
            shutil.copytree(planned / part, tmp_path / "s3" / "bucket" / "run" / part)
        process = atoll("plan", f"{bucket}/run/data", check=False)
        assert process.returncode == 2
        assert "cannot create a file only if it is absent" in process.stderr
        assert sorted(path.name for path in (tmp_path / "s3" / "bucket" / "run").iterdir()) == ["data", "partition"]
