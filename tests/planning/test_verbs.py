"""prepare, partition and plan as a person types them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from atoll.artifacts import Artifact
from atoll.cli import main
from atoll.islands.order import read_order


def test_three_commands_and_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    settings = tmp_path / "plan.toml"
    settings.write_text('mix = "1ddpm:3flow"\n[training]\nimages = 6400\nbatch = 32\n')
    commands = [
        ["prepare", "digits", "--out", str(run / "data"), "--set", "holdout=0.1"],
        ["partition", str(run / "data"), "-k", "4", "--balance", "0"],
        ["plan", str(run / "data"), "--config", str(settings), "--set", "training.batch=16", "--seed", "7"],
    ]
    for first in (True, False):
        for command in commands:
            main(command)
            told = capsys.readouterr().out
            assert ("already there" in told) is not first
            assert str(run) in told
    assert Artifact.open(run / "data").config["split"]["holdout"] == 0.1
    assert Artifact.open(run / "partition").config["balance"] is None
    order, _ = read_order(str(run / "orders" / "00.json"))
    # the file overrides the recipe, --set overrides the file
    assert (order.training.images, order.training.batch) == (6400, 16)
    assert Artifact.open(run / "orders").config["training"]["seed"] == 7


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("prepare digits --out {}/data --set hold=1", "settings: hold: extra inputs are not permitted"),
        ("prepare digits --out {}/data --set holdout", "write it as name=value"),
        ("prepare digits --out {}/data --set holdout=1.5", "holdout: input should be less than 1 (got 1.5)"),
        ("prepare digits --out {}/data --labels folder", "--labels folder: digits is no image folder"),
        ("prepare digits --out {}/data --workers 0", "--workers 0: must be at least 1"),
        ("prepare digits --out {}/data --engine dask", "--engine dask: use local or ray"),
        ("prepare digits --out {}/data --config {}/none.toml", "no such file"),
        ("prepare {}/gone --out {}/data", "no such folder or file"),
        ("partition {}/data", "does not exist"),
        ("plan {}/data", "does not exist"),
    ],
)
def test_mistakes_are_one_line(command: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(command.replace("{}", str(tmp_path)).split())
    assert exit_.value.code == 2
    told = capsys.readouterr().err.strip().splitlines()
    assert words in told[-1]
    assert not [path for path in tmp_path.rglob("*") if path.name == "manifest.json"]


def test_rejects_are_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from image_forms import Item, folder, pictures

    place = folder(tmp_path / "source", [*pictures(10), Item("page.jpg", b"<html>")])
    main(["prepare", place, "--out", str(tmp_path / "data"), "--size", "16", "--features", "pixels"])
    assert "rejected 1: not an image" in capsys.readouterr().out
    (entry,) = [json.loads(line) for line in (tmp_path / "data" / "rejects.jsonl").read_text().splitlines()]
    assert entry["reason"] == "not an image"
