"""Orders that begin from an expert of the run, such as a network that was trained on all clusters for a while."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from test_plan import orders_of

from atoll.artifacts import Artifact
from atoll.cli import main
from atoll.islands.expert import load_expert
from atoll.islands.order import read_order
from atoll.islands.train import train
from runs import resealed

SETTINGS = ["training.batch=16", "training.warmup_images=64", "training.ema_images=64"]
SETTINGS += ["network.width=16", "network.depth=1"]


def plan(run: Path, *more: str) -> None:
    main(["plan", str(run / "data"), *(word for s in SETTINGS for word in ("--set", s)), *more])


def test_experts_begin_from_a_network_of_all_clusters(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan(run, "--monolith", "--images", "160")
    order, _ = read_order(run / "orders-monolith" / "monolith.json")
    assert order.cluster is None
    assert (order.training.batch, order.training.images) == (8 * 16, 8 * 160)
    everything = {path for path in Artifact.open(run / "partition").names("clusters/") if path.endswith("safetensors")}
    assert {ref.path for ref in order.shards} == {f"partition/{path}" for path in everything}

    common = train(run / "orders-monolith" / "monolith.json", run / "start", sheets=False)
    assert common is not None
    words = ["--init", str(run / "start"), "--images", "480", "--mix", "1ddpm:7flow"]
    plan(run, *words)
    assert "7 of 8 orders begin from" in capsys.readouterr().out
    (noise,) = [each for each in orders_of(run) if each.init is None]
    assert noise.objective.kind == "epsilon", "another kind cannot be learned from a velocity's weights"
    begun = next(each for each in orders_of(run) if each.init is not None)
    assert begun.init is not None
    assert (begun.init.path, begun.init.digest) == ("start", common.digest)

    expert = train(run / "orders" / f"{begun.name}.json", run / "expert", sheets=False)
    assert expert is not None
    assert expert.manifest.parents["init"] == common.digest
    assert load_expert(run / "expert").card.origin == f"expert {common.digest[:12]}"
    plan(run, *words)
    assert "already there" in capsys.readouterr().out


def test_what_orders_cannot_begin_from_is_one_line(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan(run, "--monolith", "--images", "16")
    train(run / "orders-monolith" / "monolith.json", run / "start", sheets=False)
    resealed(run / "start", run.parent / "outside")
    shutil.copytree(run / "data", run / "copy")
    mistakes = {
        ("--init", str(run / "start"), "--set", "network.depth=2"): "its architecture is not the order's",
        ("--init", str(run / "start"), "--mix", "8ddpm"): "only velocity can be learned through the bridge",
        ("--init", str(run.parent / "outside")): f"lies outside the run {run}; copy it there first",
        ("--init", str(run / "copy")): "is a data artifact, expected expert",
        ("--init", str(run / "start"), "--reissue", "1"): "--init: has no meaning with --reissue",
    }
    for words, line in mistakes.items():
        with pytest.raises(SystemExit) as exit_:
            plan(run, *words)
        assert exit_.value.code == 2
        told = capsys.readouterr().err
        assert line in told
        assert told.count("\n") == 1
        assert not (run / "orders").exists()
