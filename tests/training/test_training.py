"""What loops share, against closed forms."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from atoll.training.checkpoint import Checkpoints, Ledger, TrainingState
from atoll.training.plan import Training
from pydantic import ValidationError
from torch import nn

from atoll.artifacts import UserError
from atoll.training.average import WeightAverage
from atoll.training.optimizer import adamw
from atoll.training.seeds import generator, seed_from
from atoll.training.step import micro_batches, report_due, take_step

PLAN = Training(images=1000, batch=10, learning_rate=0.1, ema_images=100, seed=0)


def state(seed: int = 0, device: str = "cpu") -> TrainingState:
    torch.manual_seed(seed)
    module = nn.Linear(3, 2).to(device)
    return TrainingState(module, adamw(module, 0.1, (0.9, 0.999), 0.01), WeightAverage(module, 100))


def step(current: TrainingState, images: int = 10) -> None:
    x = torch.randn(4, 3, generator=generator("x", current.images))
    where = next(current.module.parameters()).device
    loss = current.module(x.to(where)).square().mean()
    loss.backward()
    take_step(current, PLAN, loss.item(), images)


def test_the_average_halves_its_distance_every_half_life() -> None:
    module = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(module.weight)
    average = WeightAverage(module, half_life_images=80, ramp=1e9)
    nn.init.ones_(module.weight)
    for images in range(8, 88, 8):  # ten steps of eight images: one half-life
        average.update(images, 8)
    torch.testing.assert_close(average.tensors["weight"], torch.tensor([[0.5]]))


def test_the_average_forgets_its_random_start() -> None:
    module = nn.Linear(1, 1, bias=False)
    nn.init.constant_(module.weight, 1e6)
    average = WeightAverage(module, half_life_images=10**9)
    nn.init.ones_(module.weight)
    for images in range(10, 2010, 10):
        average.update(images, 10)
    assert float(average.tensors["weight"]) == pytest.approx(1.0, abs=0.01)


def test_a_state_saved_and_restored_goes_on_bit_for_bit(tmp_path: Path) -> None:
    straight = state()
    for _ in range(6):
        step(straight)
    broken = state()
    checkpoints = Checkpoints(tmp_path, seconds=0)
    for _ in range(3):
        step(broken)
    ledger = Ledger([{"images": 20, "loss": 0.1}], 0.30000000000000004, 2)
    checkpoints.save(broken, ledger)
    other = state(seed=99)  # another process: other weights, an empty optimizer
    assert checkpoints.restore(other) == ledger
    for _ in range(3):
        step(other)
    assert other.images == straight.images == 60
    for name, value in straight.tensors().items():
        assert torch.equal(value, other.tensors()[name]), name


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: NOT TESTED HERE")
def test_a_state_restored_on_a_gpu_keeps_its_step_count_there(tmp_path: Path) -> None:
    current = state(device="cuda")
    step(current)
    Checkpoints(tmp_path, 0).save(current, Ledger())
    step(current)
    other = state(seed=99, device="cuda")
    Checkpoints(tmp_path, 0).restore(other)
    step(other)
    for name, value in current.tensors().items():
        assert torch.equal(value, other.tensors()[name]), name
    assert {value.device.type for moments in other.optimizer.state.values() for value in moments.values()} == {"cuda"}


def test_only_the_newest_two_checkpoints_stay(tmp_path: Path) -> None:
    current, checkpoints = state(), Checkpoints(tmp_path, seconds=0)
    for _ in range(5):
        step(current)
        checkpoints.save(current, Ledger())
    assert sorted(p.name for p in tmp_path.glob("*.safetensors")) == [f"{n:012d}.safetensors" for n in (40, 50)]


def test_a_changed_config_is_refused_with_the_field(tmp_path: Path) -> None:
    Checkpoints(tmp_path, 1).begin({"training": {"batch": 8}}, "order")
    Checkpoints(tmp_path, 1).begin({"training": {"batch": 8}}, "order")
    with pytest.raises(UserError, match=r"training\.batch: 8 -> 16"):
        Checkpoints(tmp_path, 1).begin({"training": {"batch": 16}}, "order")


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nothing_is_updated_from_a_bad_loss(bad: float) -> None:
    current = state()
    before = {name: value.clone() for name, value in current.tensors().items()}
    current.module.weight.grad = torch.full((2, 3), bad)
    current.module.bias.grad = torch.zeros(2)
    with pytest.raises(UserError, match="nothing was updated"):
        take_step(current, PLAN, 1.0, 10)
    assert all(torch.equal(value, before[name]) for name, value in current.tensors().items())
    assert current.images == 0


def test_the_gradient_is_clipped_to_its_norm() -> None:
    plan = PLAN.model_copy(update={"gradient_clip": 0.5})
    current = state()
    current.module.weight.grad = torch.full((2, 3), 10.0)
    current.module.bias.grad = torch.zeros(2)
    seen = {}
    current.optimizer.register_step_pre_hook(
        lambda *_: seen.update(norm=current.module.weight.grad.norm().item())  # type: ignore[union-attr]
    )
    take_step(current, plan, 1.0, 10)
    assert seen["norm"] == pytest.approx(0.5, rel=1e-4)


def test_the_learning_rate_rises_and_falls_in_images() -> None:
    plan = PLAN.model_copy(update={"warmup_images": 100, "decay": "linear", "learning_rate": 1.0})
    assert plan.learning_rate_at(0) == pytest.approx(0.1)
    assert plan.learning_rate_at(90) == pytest.approx(1.0)
    assert plan.learning_rate_at(550) == pytest.approx(0.5)
    assert plan.learning_rate_at(990) == pytest.approx(10 / 900)
    twice = plan.model_copy(update={"batch": 20})
    assert twice.learning_rate_at(550) == plan.learning_rate_at(550), "decay must not depend on the batch"


def test_micro_batches_cover_the_batch_once() -> None:
    assert [list(range(10))[part] for part in micro_batches(10, 4)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert micro_batches(10, None) == [slice(0, 10)]


@pytest.mark.parametrize(("total", "batch"), [(1000, 10), (96_000, 64), (7, 3), (40, 1)])
def test_reports_are_spread_over_the_budget(total: int, batch: int) -> None:
    images, reports = 0, []
    while images < total:
        size = min(batch, total - images)
        images += size
        if report_due(images, size, total):
            reports.append(images)
    assert reports[-1] == total
    assert len(reports) == min(40, -(-total // batch))


def test_seeds_are_pure_functions_and_zero_is_a_seed() -> None:
    assert seed_from(0, "noise", 64) == seed_from(0, "noise", 64)
    keys = [
        (0, "noise", 64),
        (1, "noise", 64),
        (0, "noise", 65),
        (0, "batch", 64),
        (0, "noise", "64"),
        ("0", "noise", 64),
    ]
    assert len({seed_from(*key) for key in keys}) == len(keys)
    assert torch.equal(torch.rand(3, generator=generator(0, "a")), torch.rand(3, generator=generator(0, "a")))


@pytest.mark.parametrize(
    "change", [{"images": 0}, {"batch": -1}, {"learning_rate": 0}, {"condition_dropout": 1.0}, {"typo": 1}]
)
def test_bad_plans_are_refused(change: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        Training.model_validate({**PLAN.model_dump(), **change})


def test_only_matrices_decay() -> None:
    optimizer = adamw(nn.Linear(3, 2), 0.1, (0.9, 0.999), 0.5)
    assert {tuple(p.shape): g["weight_decay"] for g in optimizer.param_groups for p in g["params"]} == {
        (2, 3): 0.5,
        (2,): 0.0,
    }
