"""Fused kernels are asked before they are trusted. Here plain functions on the CPU stand in for them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from atoll import kernels
from atoll.artifacts import UserError
from atoll.islands.learning import ExpertLearner
from atoll.kernels import block
from atoll.models.dit import DiT, DiTConfig
from atoll.models.int8 import Int8Linear, quantised, to_int8
from atoll.runtime.placing import small_question
from atoll.training.execution import Execution
from atoll.training.trust import answering_disagreements, disagreements, trusted_kernels
from tiny_orders import tiny_learner, tiny_order


def add(h: Tensor, gate: Tensor, branch: Tensor, bias: Tensor | None = None) -> Tensor:
    return h + gate * holding(branch, bias)


def holding(branch: Tensor, bias: Tensor | None) -> Tensor:
    """A branch holds its bias already, which gets its gradient where the branch is added."""
    return branch if bias is None else branch + (bias - bias.detach()).to(branch.dtype)


def norm(h: Tensor, shift: Tensor, scale: Tensor, eps: float) -> Tensor:
    return torch.nn.functional.layer_norm(h, h.shape[-1:], eps=eps) * (1 + scale) + shift


def keep_and_norm(h: Tensor, shift: Tensor, scale: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return h, norm(h, shift, scale, eps)


def add_norm(
    h: Tensor,
    branch: Tensor,
    gate: Tensor | None,
    shift: Tensor,
    scale: Tensor,
    eps: float,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    h = h + holding(branch, bias) if gate is None else add(h, gate, branch, bias)
    return h, norm(h, shift, scale, eps)


def gelu_backward(dy: Tensor, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        y = torch.nn.functional.gelu(x, approximate="tanh")
        (dx,) = torch.autograd.grad(y, x, dy)
    return dx, y.detach(), dx.float().sum(0)


def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return torch.nn.functional.gelu(torch.nn.functional.linear(x, weight, bias), approximate="tanh")


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Blocks take the fused path on this CPU, with right functions in place of the kernels."""
    monkeypatch.setattr(kernels, "available", lambda h: kernels.Switch.on)
    monkeypatch.setattr(kernels, "norm_modulate", norm)
    monkeypatch.setattr(block, "attends", lambda *_: False)
    for function in (keep_and_norm, gelu_backward):
        monkeypatch.setattr(block, function.__name__, function)
    monkeypatch.setattr(block, "gated_add", add)
    monkeypatch.setattr(block, "add_norm_modulate", add_norm)
    for place in (kernels, block):
        monkeypatch.setattr(place, "ends_in_gelu", lambda x: kernels.Switch.on and not torch.is_grad_enabled())
    monkeypatch.setattr(kernels, "linear_gelu", linear_gelu)
    yield
    kernels.Switch.on = False


@pytest.fixture
def learner(tmp_path: Path, stand_ins: None) -> ExpertLearner:
    return tiny_learner(tiny_order(tmp_path))


def wrong(learner: ExpertLearner, precision: str = "float32") -> dict[str, float]:
    return disagreements(learner, learner.order.training, Execution.model_validate({"precision": precision}))


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_right_kernels_are_trusted(learner: ExpertLearner, precision: str) -> None:
    before = {name: value.clone() for name, value in learner.network.state_dict().items()}
    assert wrong(learner, precision) == {}
    assert all(torch.equal(value, before[name]) for name, value in learner.network.state_dict().items())


class HalfAGradient(torch.autograd.Function):
    """Right forwards, wrong backwards: the kind of fault that trains a worse expert without a word."""

    @staticmethod
    def forward(ctx: object, h: Tensor) -> Tensor:
        return h.clone()

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return 0.5 * gradient


@pytest.mark.parametrize("fault", ["forward", "backward", "bias", "nan"])
def test_wrong_kernels_are_found(learner: ExpertLearner, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    faults = {
        "forward": lambda h, gate, branch, bias: add(h, 1.1 * gate, branch, bias),
        "backward": lambda h, gate, branch, bias: add(h, gate, HalfAGradient.apply(branch), bias),
        "bias": lambda h, gate, branch, bias: add(h, gate, branch, None),
        "nan": lambda h, gate, branch, bias: add(h, gate, branch / 0.0 * 0.0, bias),
    }
    monkeypatch.setattr(block, "gated_add", faults[fault])
    found = wrong(learner)
    assert found
    assert any("gradient" in name for name in found)


class OnACard:
    """A learner whose network says that it is on a CUDA device."""

    class network:
        @staticmethod
        def parameters() -> Iterator[Tensor]:
            return iter([type("P", (), {"device": torch.device("cuda")})()])


def test_what_is_right_is_on_while_it_is_needed(learner: ExpertLearner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("atoll.training.trust.disagreements", lambda *_: {})
    with trusted_kernels(OnACard(), learner.order.training, Execution()) as doubt:  # type: ignore[arg-type]
        assert doubt is None
        assert kernels.Switch.on
    assert not kernels.Switch.on, "whoever samples in this process later has not asked"


def test_what_is_wrong_is_off_and_said(learner: ExpertLearner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("atoll.training.trust.disagreements", lambda *_: {"the answer": 0.31, "a": float("nan")})
    with trusted_kernels(OnACard(), learner.order.training, Execution()) as doubt:  # type: ignore[arg-type]
        assert doubt == "the fused kernels are 31% off on this card in the answer: computing without them, and slower"
        assert not kernels.Switch.on


def test_what_is_wrong_for_others_of_the_process_is_off_too(
    learner: ExpertLearner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A student's teachers answer while it trains, and there is one switch."""
    monkeypatch.setattr("atoll.training.trust.disagreements", lambda *_: {})
    with trusted_kernels(OnACard(), learner.order.training, Execution(), "wrong for a teacher") as doubt:  # type: ignore[arg-type]
        assert doubt == "wrong for a teacher"
        assert not kernels.Switch.on


def test_eight_bits_that_are_wrong_are_refused(learner: ExpertLearner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who asks for them by name does not get something else."""
    monkeypatch.setattr("atoll.training.trust.disagreements", lambda *_: {"the answer": 0.31})
    eight = Execution(device="cuda", precision="float8")
    with (
        pytest.raises(UserError, match=r"precision float8: .* 31% off .*bfloat16"),
        trusted_kernels(OnACard(), learner.order.training, eight),  # type: ignore[arg-type]
    ):
        pass
    assert not kernels.Switch.on


@pytest.mark.parametrize("fault", [0.0, 0.05, 0.3])
def test_eight_bits_may_be_off_by_their_rounding(
    learner: ExpertLearner, monkeypatch: pytest.MonkeyPatch, fault: float
) -> None:
    def linear(x: Tensor, weight: Tensor, bias: Tensor, *, gelu: bool = False) -> Tensor:
        x = torch.nn.functional.gelu(x, approximate="tanh") if gelu else x
        return (1.0 + fault) * torch.nn.functional.linear(x, weight.to(x.dtype), bias.to(x.dtype))

    monkeypatch.setattr(block, "mapped", linear)
    monkeypatch.setattr(block, "pulled", lambda dy, weight: dy @ weight.to(dy.dtype))
    assert bool(wrong(learner, "float8")) == (fault == 0.3)


def test_a_kernel_that_cannot_run_is_a_wrong_one(learner: ExpertLearner, monkeypatch: pytest.MonkeyPatch) -> None:
    def cannot(*_: object) -> Tensor:
        raise RuntimeError("no compiler here")

    monkeypatch.setattr(block, "gated_add", cannot)
    assert wrong(learner) == {"all of it (RuntimeError)": 1.0}
    assert not kernels.Switch.on


def test_a_cpu_has_nothing_to_distrust(learner: ExpertLearner) -> None:
    with trusted_kernels(learner, learner.order.training, Execution()) as doubt:
        assert doubt is None
        assert not kernels.Switch.on


CONDITIONS: list[dict[str, object]] = [
    {"condition": "none"},
    {"condition": "labels", "classes": 3},
    {"condition": "words", "vocabulary": 9, "text_length": 4},
    {"condition": "pooled", "text_width": 12},
    {"condition": "tokens", "text_width": 12, "text_length": 5},
]


@pytest.mark.parametrize("how", CONDITIONS, ids=lambda how: how["condition"])
def test_whoever_only_answers_asks_too(
    how: dict[str, object], stand_ins: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forwards alone, in bfloat16: right kernels are trusted, wrong ones found, and none is left on."""
    config = DiTConfig(latent=(4, 8, 8), patch=2, width=32, depth=1, heads=2, **how)  # type: ignore[arg-type]
    network = DiT(config, torch.Generator().manual_seed(0)).bfloat16().eval()
    x, time, condition = small_question(config, torch.device("cpu"))

    def wrong() -> dict[str, float]:
        return answering_disagreements(network, lambda: network(x, time, condition))

    assert wrong() == {}
    monkeypatch.setattr(kernels, "linear_gelu", lambda x, weight, bias: 1.3 * linear_gelu(x, weight, bias))
    assert "what a block adds" in wrong()
    monkeypatch.setattr(kernels, "linear_gelu", linear_gelu)
    monkeypatch.setattr(block, "gated_add", lambda h, gate, branch, bias=None: h + 1.2 * gate * branch)
    assert "what a block adds" in wrong()
    assert not kernels.Switch.on


def test_kernels_see_weights_of_eight_bits_as_weights(stand_ins: None) -> None:
    """A fused block takes a linear map's weight, not its codes."""
    config = DiTConfig(
        latent=(4, 8, 8), patch=2, width=32, depth=1, heads=2, condition="tokens", text_width=12, text_length=5
    )
    network = DiT(config, torch.Generator().manual_seed(0))
    exact = {name: module for name, module in network.blocks.named_modules() if isinstance(module, torch.nn.Linear)}
    to_int8(network)
    for name, module in network.blocks.named_modules():
        if isinstance(module, Int8Linear):
            module.codes, module.scale = quantised(exact[name].weight.detach())
            module.bias = exact[name].bias
    x, time, condition = small_question(config, torch.device("cpu"))
    with torch.no_grad():
        plain = network(x, time, condition)
        kernels.Switch.on = True
        torch.testing.assert_close(network(x, time, condition), plain)
