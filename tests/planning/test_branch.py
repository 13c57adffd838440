"""A common start, and the experts that go on from it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from atoll.artifacts import find
from atoll.cli import main
from atoll.islands.expert import load_expert
from atoll.islands.order import read_order
from atoll.islands.train import train

SETTINGS = ["training.images=640", "training.batch=16", "training.warmup_images=64", "training.ema_images=64"]
SETTINGS += ["network.width=16", "network.depth=1"]


def plan(run: Path, *more: str) -> None:
    main(["plan", str(run / "data"), *(word for s in SETTINGS for word in ("--set", s)), *more])


def test_a_start_is_trained_first_and_experts_see_what_is_left(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    branch = ["--branch", "0.25", "--mix", "1ddpm:7flow"]
    plan(run, *branch)
    said = capsys.readouterr().out
    assert f"atoll train {run}/branch/start.json --out {run}/start" in said
    assert find(run / "orders") is None, "experts cannot begin before there is a start"
    start, _ = read_order(run / "branch" / "start.json")
    assert start.cluster is None
    assert (start.training.batch, start.training.images) == (8 * 16, 8 * 160)

    trained = train(run / "branch" / "start.json", run / "start", sheets=False)
    assert trained is not None
    plan(run, *branch)
    orders = [read_order(path)[0] for path in sorted((run / "orders").glob("0*.json"))]
    flow = [order for order in orders if order.objective == start.objective]
    (noise,) = [order for order in orders if order.objective != start.objective]
    assert len(flow) == 7
    assert all(order.start is not None and order.start.digest == trained.digest for order in flow)
    assert all(order.training.images == 480 for order in flow)
    assert start.training.images + 8 * flow[0].training.images == 8 * 640, "as many images as without a start"
    assert (noise.start, noise.training.images) == (None, 640), "another objective begins at random, for all of it"

    expert = train(run / "orders" / f"{flow[0].name}.json", run / "expert", sheets=False)
    assert expert is not None
    assert expert.manifest.parents["start"] == trained.digest
    assert load_expert(run / "expert").card.origin is not None, "its card says what it has grown from"
    before = find(run / "orders")
    plan(run, *branch)
    assert before is not None
    assert "already there" in capsys.readouterr().out


def test_a_start_of_another_order_is_refused(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan(run, "--branch", "0.5", "--mix", "8flow")
    order = json.loads((run / "branch" / "start.json").read_text())
    other = run / "other" / "start.json"
    other.parent.mkdir()
    other.write_text(json.dumps(order | {"license": "none"}))
    train(other, run / "start", sheets=False)
    for words, told in ((["--branch", "0.5"], "is not an expert of"), (["--branch", "1.5"], "between 0 and 1")):
        with pytest.raises(SystemExit) as exit_:
            plan(run, "--mix", "8flow", *words)
        assert exit_.value.code == 2
        assert told in capsys.readouterr().err
