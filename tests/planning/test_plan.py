"""Orders: complete, valid, and what was asked for."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from atoll.artifacts import Artifact, UserError, sha256_file
from atoll.cli import main
from atoll.data.config import PrepareConfig
from atoll.data.dataset import LatentDataset
from atoll.data.prepare import prepare
from atoll.diffusion import Kind
from atoll.islands.expert import load_expert
from atoll.islands.order import Order, read_order
from atoll.islands.train import train
from atoll.models.dit import DiT
from atoll.planning.objectives import assign_objectives
from atoll.planning.recipes import OBJECTIVES, recipe
from atoll.planning.stage import plan
from runs import resealed

SETTINGS = ["training.batch=16", "training.warmup_images=64", "training.ema_images=64"]
SETTINGS += ["network.width=16", "network.depth=1"]


def orders_of(run: Path) -> list[Order]:
    made = Artifact.open(run / "orders", "orders")
    return [read_order(str(run / "orders" / name))[0] for name in made.names()]


def test_an_order_and_its_shards_are_all_an_island_needs(run: Path) -> None:
    plan(run / "data", run / "partition", run / "orders")
    orders = orders_of(run)
    assert len(orders) == 8
    assert {order.objective.kind for order in orders} == {Kind.VELOCITY}
    assert len({order.training.seed for order in orders}) == 8
    for order in orders:
        for shard in order.shards:
            assert sha256_file(run / shard.path) == shard.sha256
        paths = [run / shard.path for shard in order.shards if shard.split == "train"]
        samples = LatentDataset.open(paths, order.latent, order.text)
        rows = torch.arange(4)
        network = DiT(order.architecture)
        output = network(samples.latents(rows), torch.full((4,), 0.5), samples.condition(rows, torch.zeros(4)))
        assert output.shape == (4, *order.latent.shape)


def test_equal_plans_have_equal_digests_and_changes_are_refused(run: Path, tmp_path: Path) -> None:
    first = plan(run / "data", run / "partition", run / "orders")
    assert plan(run / "data", run / "partition", run / "orders").digest == first.digest
    config = recipe("digits")
    changed = config.model_copy(update={"training": config.training.model_copy(update={"batch": 32})})
    with pytest.raises(UserError, match=r"training\.batch: 64 -> 32"):
        plan(run / "data", run / "partition", run / "orders", changed)
    with pytest.raises(UserError, match="must lie beside the partition"):
        plan(run / "data", run / "partition", run / "deeper" / "orders")
    prepare("digits", tmp_path / "other", PrepareConfig(holdout=0.1))
    with pytest.raises(UserError, match=r"was not made from .*; pass --partition with .*, or the data"):
        plan(tmp_path / "other", run / "partition", run / "orders-2")


def test_orders_carry_the_license_of_the_data(tmp_path: Path) -> None:
    """No command could set one."""
    main(["prepare", "digits[:100]", "--license", "CC0-1.0", "--out", str(tmp_path / "data")])
    main(["partition", str(tmp_path / "data"), "-k", "2"])
    main(["plan", str(tmp_path / "data")])
    assert {order.license for order in orders_of(tmp_path)} == {"CC0-1.0"}


def test_stray_names_and_foreign_manifests_stop_no_plan(run: Path) -> None:
    """`a:b` in the run folder once did, as an unsafe file name in a manifest."""
    for name in ("a:b", "a\\b", "foreign", "pipe"):
        (run / name).mkdir()
    (run / "foreign" / "manifest.json").write_text('{"files": {"c:x": 1}}')
    os.mkfifo(run / "pipe" / "manifest.json")
    main(["plan", str(run / "data")])
    assert len(orders_of(run)) == 8


def test_data_that_did_not_grow_has_no_orders_to_reissue(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It was an IndexError."""
    main(["plan", str(run / "data")])
    with pytest.raises(SystemExit):
        main(["plan", str(run / "data"), "--onto", str(run / "orders")])
    assert "did not grow from partition, the model's partition" in capsys.readouterr().err


def test_settings_come_from_recipe_file_and_options_in_this_order(run: Path, tmp_path: Path) -> None:
    file = tmp_path / "plan.toml"
    tables = ["[training]", "images = 6400", "batch = 32", "[objective.flow.density]", 'name = "uniform"']
    file.write_text("\n".join(['objectives = "1ddpm:7flow"', *tables]))
    main(["plan", str(run / "data"), "--config", str(file), "--set", "training.batch=16", "--seed", "7"])
    (noise,) = [order for order in orders_of(run) if order.objective.kind is Kind.EPSILON]
    assert (noise.training.images, noise.training.batch) == (6400, 16)
    assert Artifact.open(run / "orders").config["training"]["seed"] == 7
    assert {order.objective.density.name for order in orders_of(run) if order is not noise} == {"uniform"}


@pytest.mark.parametrize(
    ("text", "fixed", "expected"),
    [
        ("2ddpm:2flow", {}, ["flow", "ddpm", "flow", "ddpm"]),
        ("1flow:3ddpm", {}, ["ddpm", "flow", "ddpm", "ddpm"]),
        (None, {}, ["flow"] * 4),
        # objectives of islands count
        ("1ddpm:3flow", {0: "ddpm"}, ["ddpm", "flow", "flow", "flow"]),
        ("2ddpm:2flow", {1: "flow"}, ["flow", "flow", "ddpm", "ddpm"]),
        # the default gives way to them
        (None, {0: "ddpm", 1: "ddpm"}, ["ddpm", "ddpm", "flow", "flow"]),
    ],
)
def test_the_first_named_objective_goes_where_the_energy_is(
    text: str | None, fixed: dict[int, str], expected: list[str]
) -> None:
    assert assign_objectives(text, OBJECTIVES, [0.1, 0.9, 0.5, 0.7], fixed) == expected


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("2ddpm:7flow", "names 9 experts, the partition has 4 clusters"),
        ("2edm:2flow", "unknown objective 'edm'; use ddpm, flow, v"),
        ("flow,ddpm", "--objectives flow,ddpm: is no list; write how many of each, such as 2ddpm:6flow"),
        ("4flow", r"the islands file has others \(cluster 1: ddpm\)"),
    ],
)
def test_bad_objectives_are_one_line(text: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        assign_objectives(text, OBJECTIVES, [0.0] * 4, {1: "ddpm"})


def test_high_frequency_energy_decides(run: Path) -> None:
    """The clusters with the largest squared differences of neighboring latents, computed again here."""
    main(["plan", str(run / "data"), "--objectives", "2v:6flow"])
    energy = []
    for k in range(8):
        path = run / f"partition/clusters/{k:02d}/train-00000.safetensors"
        samples = LatentDataset.open([path], orders_of(run)[0].latent)
        latents = samples.latents(torch.arange(len(samples))).numpy()
        across, down = latents[..., 1:] - latents[..., :-1], latents[..., 1:, :] - latents[..., :-1, :]
        energy.append((across**2).mean() + (down**2).mean())
    chosen = {order.cluster for order in orders_of(run) if order.objective.kind is Kind.V}
    assert chosen == set(sorted(range(8), key=lambda k: energy[k])[-2:])


def test_experts_begin_from_a_network_of_all_clusters(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan_small(run, "--monolith", "--images", "160")
    order, _ = read_order(run / "orders-monolith" / "monolith.json")
    assert order.cluster is None
    assert (order.training.batch, order.training.images) == (8 * 16, 8 * 160)
    everything = {path for path in Artifact.open(run / "partition").names("clusters/") if path.endswith("safetensors")}
    assert {ref.path for ref in order.shards} == {f"partition/{path}" for path in everything}

    common = train(run / "orders-monolith" / "monolith.json", run / "start", sheets=False)
    assert common is not None
    words = ["--init", str(run / "start"), "--images", "480", "--objectives", "1ddpm:7flow"]
    plan_small(run, *words)
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
    plan_small(run, *words)
    assert "already there" in capsys.readouterr().out

    resealed(run / "start", run.parent / "outside")
    mistakes = {
        ("--init", str(run / "start"), "--set", "network.depth=2"): "its architecture is not the order's",
        ("--init", str(run / "start"), "--objectives", "8ddpm"): "only velocity can be learned through the bridge",
        ("--init", str(run.parent / "outside")): f"lies outside the run {run}; put it there",
        ("--init", str(run / "data")): "is a data artifact, expected expert",
        ("--init", str(run / "start"), "--reissue", "1"): "--init: has no meaning with --reissue",
    }
    for words, line in mistakes.items():
        with pytest.raises(SystemExit) as exit_:
            plan_small(run, "--out", str(run / "more"), *words)
        assert exit_.value.code == 2
        printed = capsys.readouterr().err
        assert line in printed
        assert printed.count("\n") == 1
        assert not (run / "more").exists()


def plan_small(run: Path, *more: str) -> None:
    main(["plan", str(run / "data"), *(word for setting in SETTINGS for word in ("--set", setting)), *more])
