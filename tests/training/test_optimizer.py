"""Our guarded AdamW, in both storages of its moments, against torch's."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from atoll.training.execution import Execution
from atoll.training.optimizer import GuardedAdamW, GuardedAdamW8bit, adamw, moment_in_float32, quantisable
from atoll.training.recipe import Training

TRAINING = Training(
    images=1000, batch=10, learning_rate=0.01, weight_decay=0.1, betas=(0.8, 0.95), ema_images=100, seed=0
)
STORAGES = ["float32", "8-bit"]


def network() -> nn.Module:
    """Large enough that two of its four tensors are stored in eight bits."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(32, 128), nn.Tanh(), nn.Linear(128, 32))


def guarded(module: nn.Module, moments: str) -> GuardedAdamW | GuardedAdamW8bit:
    execution = Execution(moments=moments)  # type: ignore[arg-type]
    optimizer = adamw(module, TRAINING, execution)
    optimizer.param_groups[0]["lr"].fill_(TRAINING.learning_rate)
    return optimizer


def gradients(module: nn.Module, seed: int, size: float = 1.0) -> None:
    numbers = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        parameter.grad = size * torch.randn(parameter.shape, generator=numbers)


def step(optimizer: GuardedAdamW | GuardedAdamW8bit, *, scale: float = 1.0, found_inf: float = 0.0) -> None:
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(scale), torch.tensor(found_inf)
    optimizer.step()


def everything(module: nn.Module, optimizer: GuardedAdamW | GuardedAdamW8bit) -> dict[str, Tensor]:
    """Weights and moments as they are stored, copied."""
    flat = {name: value.detach().clone() for name, value in module.named_parameters()}
    for name, parameter in module.named_parameters():
        flat |= {f"{name}/{key}": value.clone() for key, value in optimizer.moments(parameter).items()}
    return flat


def reference(module: nn.Module) -> torch.optim.AdamW:
    """torch's own loop over tensors, matrices decaying and vectors not."""
    groups = [
        {"params": [p for p in module.parameters() if p.ndim == 2], "weight_decay": TRAINING.weight_decay},
        {"params": [p for p in module.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=TRAINING.learning_rate, betas=TRAINING.betas, eps=1e-8, foreach=False)


@pytest.mark.parametrize("clip", [None, 0.5, 1e9])
def test_step_by_step_it_is_torchs(clip: float | None) -> None:
    """Clipping by `grad_scale` is clip_grad_norm_ and then a step."""
    ours, theirs = network(), network()
    optimizer, expected = guarded(ours, "float32"), reference(theirs)
    for seed in range(20):
        gradients(ours, seed)
        gradients(theirs, seed)
        norm = torch.cat([p.grad.flatten() for p in ours.parameters() if p.grad is not None]).norm()
        if clip is not None:
            nn.utils.clip_grad_norm_(theirs.parameters(), clip)
        step(optimizer, scale=1.0 if clip is None else max(1.0, float(norm) / clip))
        expected.step()
        for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        for name, value in optimizer.moments(mine).items():
            torch.testing.assert_close(value, expected.state[other][name], rtol=1e-5, atol=1e-7)


def test_the_rate_is_read_at_every_step_by_all_groups() -> None:
    ours, theirs = network(), network()
    optimizer, expected = guarded(ours, "float32"), reference(theirs)
    for seed, rate in enumerate((0.1, 0.0, 0.03)):
        gradients(ours, seed)
        gradients(theirs, seed)
        optimizer.param_groups[0]["lr"].fill_(rate)
        for group in expected.param_groups:
            group["lr"] = rate
        step(optimizer)
        expected.step()
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("before", [0, 5])
@pytest.mark.parametrize("moments", STORAGES)
def test_a_step_that_is_left_out_changes_nothing_at_all(moments: str, before: int) -> None:
    """Weights, moments and step count to the bit; the next good step is the one there would have been."""
    module, other = network(), network()
    optimizer, untouched = guarded(module, moments), guarded(other, moments)
    for seed in range(before):
        for each, its in ((module, optimizer), (other, untouched)):
            gradients(each, seed)
            step(its)
    expected = everything(module, optimizer)
    for bad in (float("nan"), float("inf"), 1.0):
        for parameter in module.parameters():
            parameter.grad = torch.full_like(parameter, bad)
        step(optimizer, scale=bad, found_inf=1.0)
        for name, value in everything(module, optimizer).items():
            assert torch.equal(value, expected[name]), (name, bad)
    for each, its in ((module, optimizer), (other, untouched)):
        gradients(each, 99)
        step(its)
    after = everything(other, untouched)
    assert all(torch.equal(value, after[name]) for name, value in everything(module, optimizer).items())


def test_small_tensors_keep_their_precision_in_eight_bits() -> None:
    module = network()
    optimizer = guarded(module, "8-bit")
    stored = {name: "exp_avg.codes" in optimizer.moments(p) for name, p in module.named_parameters()}
    assert stored == {"0.weight": True, "0.bias": False, "2.weight": True, "2.bias": False}


def fitted(moments: str, steps: int = 300) -> float:
    """Squared error of a regression onto another network's answers, after so many steps."""
    torch.manual_seed(0)
    teacher = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 32))
    x = torch.randn(512, 32)
    with torch.no_grad():
        y = teacher(x)
    module = network()
    optimizer = guarded(module, moments)
    for number in range(steps):
        rows = torch.arange(64) + 64 * (number % 8)
        optimizer.zero_grad(set_to_none=True)
        F.mse_loss(module(x[rows]), y[rows]).backward()
        step(optimizer)
    with torch.no_grad():
        return F.mse_loss(module(x), y).item()


def test_eight_bits_learn_like_float32() -> None:
    wide, narrow = fitted("float32"), fitted("8-bit")
    assert wide < 0.5 * fitted("float32", steps=20), "it must have learned something to be compared"
    assert narrow == pytest.approx(wide, rel=0.05)


def test_in_float32_storage_the_update_of_eight_bits_is_adamw() -> None:
    """On tensors too small to be quantised both are the same formula."""
    torch.manual_seed(0)
    ours = nn.Linear(10, 10)
    theirs = copy.deepcopy(ours)
    optimizer, expected = guarded(ours, "8-bit"), reference(theirs)
    for seed in range(20):
        gradients(ours, seed)
        gradients(theirs, seed)
        step(optimizer)
        expected.step()
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("moments", STORAGES)
def test_moments_survive_a_checkpoint_exactly(moments: str) -> None:
    module, other = network(), network()
    optimizer, restored = guarded(module, moments), guarded(other, moments)
    for seed in range(5):
        gradients(module, seed)
        step(optimizer)
    with torch.no_grad():
        for mine, its in zip(module.parameters(), other.parameters(), strict=True):
            its.copy_(mine)
            restored.restore_moments(its, {n: v.clone() for n, v in optimizer.moments(mine).items()})
    for each, its in ((module, optimizer), (other, restored)):
        gradients(each, 99)
        step(its)
    expected = everything(module, optimizer)
    for name, value in everything(other, restored).items():
        assert torch.equal(value, expected[name]), name


@pytest.mark.parametrize(("before", "after"), [("8-bit", "float32"), ("float32", "8-bit")])
def test_moments_are_converted_from_one_storage_to_the_other(before: str, after: str) -> None:
    module, other = network(), network()
    optimizer, converted = guarded(module, before), guarded(other, after)
    for seed in range(5):
        gradients(module, seed)
        step(optimizer)
    for mine, its in zip(module.parameters(), other.parameters(), strict=True):
        converted.restore_moments(its, optimizer.moments(mine))
        assert float(converted.moments(its)["step"]) == 5
        for name in ("exp_avg", "exp_avg_sq"):
            old, new = (
                moment_in_float32(storage.moments(parameter), name).view_as(parameter)
                for storage, parameter in ((optimizer, mine), (converted, its))
            )
            exact = before == "8-bit" or not quantisable(mine)
            # eight bits: the map's largest gap is 1.4 % of a block's largest value, and rounding is to the nearest
            atol = 0.0 if exact else 0.01 * old.abs().max().item()
            torch.testing.assert_close(new, old, rtol=0, atol=atol)


def test_a_parameter_without_a_gradient_is_left_alone() -> None:
    for moments in STORAGES:
        module = network()
        optimizer = guarded(module, moments)
        gradients(module, 0)
        module.get_parameter("0.weight").grad = None
        before = module.get_parameter("0.weight").detach().clone()
        step(optimizer)
        assert torch.equal(module.get_parameter("0.weight"), before)


def test_only_matrices_decay() -> None:
    module = network()
    for moments in STORAGES:
        decay = {p.ndim: g["weight_decay"] for g in guarded(module, moments).param_groups for p in g["params"]}
        assert decay == {2: TRAINING.weight_decay, 1: 0.0}


@pytest.mark.parametrize("skipped", [1, None])
def test_where_the_device_ignores_the_guard_the_host_keeps_it(skipped: int | None) -> None:
    """As on Apple's GPUs, whose fused kernels take no notice of the two scalars: the same weights, step by step."""
    ours, theirs = network(), network()
    groups = [{"params": list(ours.parameters()), "weight_decay": 0.0}]
    optimizer = GuardedAdamW(groups, TRAINING.betas, torch.tensor(0.01), fused=False)
    groups = [{"params": list(theirs.parameters()), "weight_decay": 0.0}]
    expected = GuardedAdamW(groups, TRAINING.betas, torch.tensor(0.01), fused=True)
    for seed in range(4):
        for module, each in ((ours, optimizer), (theirs, expected)):
            gradients(module, seed)
            step(each, scale=2.0, found_inf=float(seed == skipped))
        for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-7)
