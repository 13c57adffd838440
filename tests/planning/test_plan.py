"""Orders: complete, valid, and what was asked for."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from atoll.artifacts import Artifact, UserError, sha256_file
from atoll.data.shards import ShardSet
from atoll.islands.order import read_order
from atoll.models.dit import DiT
from atoll.planning import plan, recipe
from atoll.planning.mix import read_mix
from atoll.planning.recipes import OBJECTIVES, digits
from atoll.process import Kind


def orders_of(run: Path):  # type: ignore[no-untyped-def]
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
        samples = ShardSet([run / shard.path for shard in order.shards if shard.split == "train"], order.text)
        rows = torch.arange(4)
        network = DiT(order.architecture)
        answer = network(samples.latents(rows), torch.full((4,), 0.5), samples.condition(rows, torch.zeros(4)))
        assert answer.shape == (4, *order.latent.shape)


def test_equal_plans_have_equal_digests_and_changes_are_refused(run: Path) -> None:
    first = plan(run / "data", run / "partition", run / "orders")
    assert plan(run / "data", run / "partition", run / "orders").digest == first.digest
    config = recipe("digits")
    changed = config.model_copy(update={"training": config.training.model_copy(update={"batch": 32})})
    with pytest.raises(UserError, match=r"training\.batch: 64 -> 32"):
        plan(run / "data", run / "partition", run / "orders", changed)
    with pytest.raises(UserError, match="must lie beside the partition"):
        plan(run / "data", run / "partition", run / "deeper" / "orders")


def dealt(mix: str | None, detail: list[float], insisted: dict[int, str] | None = None) -> list[str]:
    return read_mix(mix, OBJECTIVES, len(detail)).deal(detail, insisted or {})


def test_the_first_named_objective_goes_where_the_detail_is() -> None:
    detail = [0.1, 0.9, 0.5, 0.7]
    assert dealt("2ddpm:2flow", detail) == ["flow", "ddpm", "flow", "ddpm"]
    assert dealt("1flow:3ddpm", detail) == ["ddpm", "flow", "ddpm", "ddpm"]
    assert dealt("flow,flow,ddpm,flow", detail) == ["flow", "flow", "ddpm", "flow"]
    for count in (1, 4, 8):
        assert dealt(None, [0.0] * count) == ["flow"] * count


def test_what_islands_insist_on_counts() -> None:
    detail = [0.1, 0.9, 0.5, 0.7]
    assert dealt("1ddpm:3flow", detail, {0: "ddpm"}) == ["ddpm", "flow", "flow", "flow"]
    assert dealt("2ddpm:2flow", detail, {1: "flow"}) == ["flow", "flow", "ddpm", "ddpm"]
    assert dealt("flow,flow,ddpm,flow", detail, {2: "ddpm"}) == ["flow", "flow", "ddpm", "flow"]
    # nobody asked for the default mix, so it gives way
    assert dealt(None, detail, {0: "ddpm", 1: "ddpm"}) == ["ddpm", "ddpm", "flow", "flow"]
    assert dealt(None, detail, dict.fromkeys(range(4), "ddpm")) == ["ddpm"] * 4


@pytest.mark.parametrize(
    ("mix", "words"),
    [
        ("2ddpm:7flow", "names 9 experts, the partition has 4 clusters"),
        ("2edm:2flow", "unknown objective 'edm'; use ddpm, flow"),
        ("nonsense", "unknown objective 'nonsense'"),
        ("", "unknown objective ''"),
    ],
)
def test_a_bad_mix_is_one_line(mix: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        read_mix(mix, OBJECTIVES, 4)


def test_experts_may_predict_v(run: Path) -> None:
    """On the cosine schedule; what a plan that does not name it writes down is as ever."""
    usual = digits()
    plan(run / "data", run / "partition", run / "orders", usual.model_copy(update={"mix": "2v:6flow"}))
    found = [order.objective for order in orders_of(run)]
    assert [objective.kind for objective in found].count(Kind.V) == 2
    assert {objective.schedule.name for objective in found if objective.kind is Kind.V} == {"cosine-vp"}
    assert "v" not in usual.model_dump()["objectives"]


def test_data_and_partition_must_belong_together(run: Path, tmp_path: Path) -> None:
    from atoll.data.prepare import PrepareConfig, prepare

    prepare("digits", tmp_path / "other", PrepareConfig(holdout=0.1))
    with pytest.raises(UserError, match=r"was not made from .*; pass --partition with .*, or the data"):
        plan(tmp_path / "other", run / "partition", run / "orders")
