"""Where a run stands: each stage of its newest version, and the command that makes what is missing."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from atoll.artifacts import Store
from atoll.cli import main
from atoll.registry.changes import roll_back
from atoll.registry.status import Stage, stages
from atoll.registry.versions import open_ensemble
from runs import versions_of


def stand(run: Path) -> tuple[dict[str, Stage], list[str]]:
    """The stages by name, and the commands in order."""
    found = stages(Store.at(run))
    return {stage.name: stage for stage in found}, list(dict.fromkeys(s.next for s in found if s.next))


def part_of(late: Path, place: Path, *names: str) -> Path:
    for name in names:
        shutil.copytree(late / "runs" / "digits" / name, place / name)
    return place


@pytest.mark.parametrize("what", ["an empty folder", "somebody's files"])
def test_what_is_no_run_is_told_so(what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if what == "somebody's files":
        (tmp_path / "letters").mkdir()
        (tmp_path / "manifest.json").write_text('{"not": "ours"}')
    with pytest.raises(SystemExit) as exit_:
        main(["status", str(tmp_path)])
    assert exit_.value.code == 2
    told = capsys.readouterr()
    assert "is no run, it holds nothing of one" in told.err
    assert told.out == ""


def test_before_the_model_begins_each_stage_asks_for_the_next(late: Path, tmp_path: Path) -> None:
    run = part_of(late, tmp_path / "run", "data")
    found, commands = stand(run)
    assert found["data"].digest
    assert not found["partition"].digest
    assert commands[0] == f"atoll partition {run}/data -k 8"
    part_of(late, run, "partition")
    _, commands = stand(run)
    assert commands[0] == f"atoll plan {run}/data"


def test_late_data_is_led_from_one_command_to_the_next(late: Path, tmp_path: Path) -> None:
    """The commands that status gives are those of the story in docs/data.md."""
    run = Path(shutil.copytree(late / "runs" / "digits", tmp_path / "run"))
    moved = next(v for v in versions_of(run) if v.change.startswith("grew onto"))
    roll_back(Store.at(run), moved.version - 1)
    shutil.rmtree(run / "orders-2")
    aside = (run / "partition-2").rename(tmp_path / "aside")

    found, commands = stand(run)
    assert "not taken in yet" in found["data-2"].what
    assert commands[0] == f"atoll partition {run}/data-2 --onto {run}/partition"
    aside.rename(run / "partition-2")
    _, commands = stand(run)
    assert commands[0] == f"atoll plan {run}/data-2 --onto {run}/orders"
    main([*commands[0].split()[1:], "--images", "320", "--grown-by", "0.18"])

    found, commands = stand(run)
    assert found["expert 0"].digest, "the old one serves meanwhile"
    assert "orders-2/00.json waits for an expert" in found["expert 0"].what
    assert found["expert 2"].next == ""
    assert "of an older partition, to be refreshed" in found["router"].what
    assert found["evaluation.json"].what == "of another version"
    assert commands == [
        *(f"atoll train {run}/orders-2/0{k}.json --out EXPERT && atoll admit EXPERT --out {run}" for k in (0, 1)),
        f"atoll router {run}",
        f"atoll evaluate {run}",
    ]


def test_what_is_lost_damaged_or_begun_is_named(late: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(late / "runs" / "digits", tmp_path / "run"))
    serving = {m.cluster: m for m in open_ensemble(Store.at(run)).serving}
    shutil.rmtree(run / serving[0].path)
    (run / serving[1].path / "manifest.json").write_text("{")
    main(["ensemble", str(run), "--remove", "2"])
    shutil.rmtree(run / "partition-2")
    (run / ".data-3.partial").mkdir()
    (run / "report.html").unlink()
    found, commands = stand(run)
    assert "missing, damaged or another one" in found["partition-2"].what
    for cluster in (0, 1):
        assert not found[f"expert {cluster}"].digest
        assert f"{serving[cluster].path} is missing or damaged" in found[f"expert {cluster}"].what
    assert found["expert 2"].next == f"atoll ensemble {run} --use {serving[2].name}"
    assert found["report.html"].next == f"atoll evaluate {run}"
    assert "begun" in found["data-3"].what
    assert found["evaluation.json"].what == "of another version"
    assert f"atoll evaluate {run}" in commands
