"""Many organizers at once, in real processes: on a disk and on an S3 server nothing is lost, or it is refused."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from racing import check_nothing_is_lost, put, race

from atoll.artifacts import Store, UserError
from atoll.cli import main
from s3_servers import moto_bucket, rclone_bucket, upload

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
        assert not [name for name in Store.at(f"{bucket}/run").children() if name.startswith(".")], "a probe was left"


def test_a_store_that_ignores_conditions_is_refused_with_the_reason(
    planned: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """rclone's server lets everybody create the same file: two organizers would undo each other there."""
    with rclone_bucket(tmp_path / "s3") as bucket:
        upload(begun_run(planned, tmp_path / "run"), f"{bucket}/run")
        run = Store.at(f"{bucket}/run")
        before = {path: path.read_bytes() for path in (tmp_path / "s3").rglob("*") if path.is_file()}
        with pytest.raises(UserError, match="let the same file be created twice") as caught:
            put(run, "orders-2", 0)
        assert "two organizers at once would undo each other" in str(caught.value)
        assert "\n" not in str(caught.value)
        with pytest.raises(SystemExit) as exit_:
            main(["ensemble", f"{bucket}/run", "--route", "top-1"])
        assert exit_.value.code == 2
        line = capsys.readouterr().err
        assert f"{bucket}/run: this store cannot create a file only if it is absent" in line
        assert line.count("\n") == 1
        after = {path: path.read_bytes() for path in (tmp_path / "s3").rglob("*") if path.is_file()}
        assert after == before, "nothing is written there, and the probe is gone"
        main(["ensemble", f"{bucket}/run"])
        assert "version 1" in capsys.readouterr().out, "but it can be read"


def test_plan_refuses_such_a_store_before_it_writes_orders(
    planned: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with rclone_bucket(tmp_path / "s3") as bucket:
        for part in ("data", "partition"):
            shutil.copytree(planned / part, tmp_path / "s3" / "bucket" / "run" / part)
        with pytest.raises(SystemExit):
            main(["plan", f"{bucket}/run/data"])
        assert "cannot create a file only if it is absent" in capsys.readouterr().err
        assert sorted(path.name for path in (tmp_path / "s3" / "bucket" / "run").iterdir()) == ["data", "partition"]
