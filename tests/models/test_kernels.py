"""The kernels compute the plain formulas: interpreted on a CPU, for real on CUDA; and a network uses right ones only.

Triton's interpreter is chosen when Triton is imported, so the interpreted checks run in a process of their own.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from atoll import kernels
from atoll.kernels import attention
from atoll.kernels.attention import LONGEST
from atoll.kernels.float8 import to_float8
from atoll.models.dit import Block, DiT, DiTConfig
from atoll.models.kernel_check import fuse, use_kernels, wrong_kernels

EPS = 1e-6
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
TINY = DiTConfig(latent=(3, 4, 8), patch=2, width=48, depth=1, heads=2)
WITH_TEXT = replace(TINY, condition="tokens", text_width=6, text_length=5)


def test_interpreted_kernels() -> None:
    """Every test below, on the CPU, by Triton's interpreter."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("needs triton (pip install triton): kernels NOT TESTED HERE")
    if INTERPRETED:
        pytest.skip("this is the process with the interpreter")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:]


@pytest.fixture
def device() -> str:
    if INTERPRETED:
        return "cpu"
    if not torch.cuda.is_available():
        pytest.skip("needs CUDA, or TRITON_INTERPRET=1 on a CPU: NOT TESTED HERE")
    return "cuda"


def random(device: str, *shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]


def agree(ours: Tensor, truth: Tensor, tolerance: float) -> None:
    assert ours.shape == truth.shape
    assert (ours.double() - truth).norm() <= tolerance * truth.norm()


@pytest.mark.parametrize("vectors", [1, 2, 3])
@pytest.mark.parametrize("size", [(2, 7, 48), (1, 65, 1152), (3, 1, 384), (2, 33, 20)], ids=str)
def test_norm_and_gated_residual(size: tuple[int, int, int], vectors: int, device: str) -> None:
    images, _tokens, width = size
    if vectors not in (1, images):
        pytest.skip("one vector for all images, or one for each")
    h, branch, six = random(device, size, size, (vectors, 6, 1, width))
    h, gate, shift, scale = 3 * h + 1, six[:, 2], six[:, 3], six[:, 4]
    agree(kernels.norm_modulate(h, shift, scale, EPS), plain_modulate(*map(Tensor.double, (h, shift, scale))), 1e-6)
    agree(kernels.gated_add(h, gate, branch), h.double() + gate.double() * branch.double(), 1e-6)


HEADS = [(2, 20, 5, 2, 24), (1, 65, 77, 2, 72), (1, 256, 130, 1, 72), (2, 17, 16, 1, 64), (2, 16, 40, 1, 128)]


@pytest.mark.parametrize("case", ["self", "cross", "masked"])
@pytest.mark.parametrize("size", HEADS, ids=str)
def test_attention(size: tuple[int, int, int, int, int], case: str, device: str) -> None:
    """Output and gradients, against the formula in float64."""
    images, tokens, keys, heads, head = size
    width = heads * head
    mask = None
    if case == "self":
        inputs = random(device, (images, tokens, 3 * width), dtype=torch.float16)
    else:
        inputs = random(device, (images, tokens, width), (images, keys, 2 * width), dtype=torch.float16)
    if case == "masked":
        mask = (torch.rand(images, keys, generator=torch.Generator().manual_seed(2)) < 0.4).to(device)
        mask[:, : keys // 2] = False  # a whole block of keys may be forbidden
        mask[:, -2:] = True

    def ours(q: Tensor, kv: Tensor | None = None) -> Tensor:
        return kernels.attend(q, kv, mask, heads)

    def plain(q: Tensor, kv: Tensor | None = None) -> Tensor:
        q, k, v = q.chunk(3, 2) if kv is None else (q, *kv.chunk(2, 2))
        q, k, v = (x.unflatten(2, (heads, head)).transpose(1, 2) for x in (q, k, v))
        scores = q @ k.transpose(2, 3) * head**-0.5
        if mask is not None:
            scores = scores.masked_fill(~mask[:, None, None], -torch.inf)
        return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)

    truth = with_gradients(plain, [x.double() for x in inputs])
    for found, true in zip(with_gradients(ours, inputs), truth, strict=True):
        agree(found, true, 2e-3)


def with_gradients(function: Callable[..., Tensor], inputs: list[Tensor]) -> list[Tensor]:
    leaves = [x.detach().requires_grad_() for x in inputs]
    output = function(*leaves)
    pull = torch.randn(output.shape, generator=torch.Generator().manual_seed(5)).to(output)
    return [output, *torch.autograd.grad(output, leaves, pull)]


def plain_modulate(h: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    mean, variance = h.mean(-1, keepdim=True), h.var(-1, keepdim=True, unbiased=False)
    return (h - mean) / (variance + EPS).sqrt() * (1 + scale) + shift


def test_sizes_without_a_kernel_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "available", lambda x: True)
    q, kv = torch.zeros(2, 4, 64), torch.zeros(2, 5, 128)
    for wrong in (
        (torch.zeros(1, LONGEST + 1, 192), None, None, 1),
        (q, torch.zeros(2, LONGEST + 1, 128), None, 1),
        (q, kv, None, 8),  # heads of 8
        (q, kv[:1], None, 1),
        (q, kv, torch.ones(2, 4, dtype=torch.bool), 1),
    ):
        with pytest.raises(AssertionError):
            kernels.attend(*wrong)
    with pytest.raises(AssertionError, match="branch"):
        kernels.gated_add(torch.zeros(2, 4, 8), torch.zeros(2, 1, 8), torch.zeros(2, 3, 8))


@pytest.mark.parametrize("config", [TINY, WITH_TEXT, replace(WITH_TEXT, variant="adaln")], ids=["", "text", "adaln"])
def test_a_block_is_the_same_block(config: DiTConfig, device: str) -> None:
    """The check finds nothing; in float16, as the interpreter computes nothing in bfloat16."""
    assert wrong_kernels(config, config.image_tokens, torch.device(device), torch.float16) is None


@pytest.mark.skipif(INTERPRETED or not torch.cuda.is_available(), reason="needs CUDA: NOT TESTED HERE")
@pytest.mark.parametrize("config", [TINY, WITH_TEXT], ids=["", "text"])
def test_a_block_compiles_into_one_graph_on_cuda(config: DiTConfig) -> None:
    """Under bfloat16 autocast, compiled, fused: within bfloat16's error of the plain block in float32."""
    block = Block(config).cuda()
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.normal_(0.0, 0.05, generator=torch.Generator("cuda").manual_seed(0))
    h, signal, text = random("cuda", (3, 8, 48), (6, 3, 48), (3, 5, 48))
    mask = (torch.arange(5, device="cuda") < torch.tensor([[1], [4], [5]], device="cuda"))[:, None, None]
    given = (text, mask) if block.cross else (None, None)
    truth = with_gradients(lambda h, signal: block(h, signal, *given), [h, signal])
    fuse(block)
    compiled = torch.compile(block, fullgraph=True, dynamic=False)
    with torch.autocast("cuda", torch.bfloat16):
        found = with_gradients(lambda h, signal: compiled(h, signal, *given), [h.bfloat16(), signal])
    for a, b in zip(found, truth, strict=True):
        agree(a, b.double(), 0.03)


# ---------------------------------------------------------------------------------------------------------------
# The check, with plain functions in place of the kernels


class HalfAGradient(torch.autograd.Function):
    """Right forwards, wrong backwards: the kind of fault that trains a worse expert without a word."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return 0.5 * gradient


def stand_in(q: Tensor, kv: Tensor | None, mask: Tensor | None, heads: int) -> Tensor:
    q, k, v = q.chunk(3, 2) if kv is None else (q, *kv.chunk(2, 2))
    q, k, v = (x.unflatten(2, (heads, -1)).transpose(1, 2) for x in (q, k, v))
    given = None if mask is None else mask[:, None, None]
    return F.scaled_dot_product_attention(q, k, v, given).transpose(1, 2).flatten(2)


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("available", "can_attend"):
        monkeypatch.setattr(kernels, name, lambda *_: True)
    monkeypatch.setattr(kernels, "attend", stand_in)
    monkeypatch.setattr(
        kernels, "norm_modulate", lambda h, shift, scale, eps: F.layer_norm(h, h.shape[-1:]) * (1 + scale) + shift
    )
    monkeypatch.setattr(kernels, "gated_add", lambda h, gate, branch: h + gate * branch)
    wrong_kernels.cache_clear()
    yield
    wrong_kernels.cache_clear()


def broken(*_: Any) -> Tensor:
    raise RuntimeError("no image for this GPU")


FAULTS: dict[str, tuple[str, Callable[..., Tensor], str]] = {
    "forward": ("attend", lambda *given: 1.2 * stand_in(*given), "off on this GPU"),
    "backward": ("attend", lambda *given: HalfAGradient.apply(stand_in(*given)), "gradient"),
    "mask": ("attend", lambda q, kv, mask, heads: stand_in(q, kv, None, heads), "off on this GPU"),
    "without gradients": ("gated_add", lambda h, gate, branch: h + 1.2 * gate * branch, "output without gradients"),
    "nan": ("norm_modulate", lambda h, *_: h / 0.0 * 0.0, "nan% off"),
    "broken": ("attend", broken, "RuntimeError"),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.usefixtures("stand_ins")
def test_wrong_kernels_are_found_and_left_off(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    network = DiT(WITH_TEXT)
    assert use_kernels(network) is None
    assert network.blocks[0].fused
    assert network.blocks[0].cross.fused
    assert network.head.fused
    fuse(network, on=False)
    wrong_kernels.cache_clear()
    name, function, words = FAULTS[fault]
    monkeypatch.setattr(kernels, name, function)
    line = use_kernels(network)
    assert line is not None
    assert words in line
    assert not any(module.fused for module in network.modules() if hasattr(module, "fused"))


@pytest.mark.skipif(INTERPRETED, reason="about CPUs without kernels")
def test_a_cpu_uses_the_plain_formulas() -> None:
    network = DiT(WITH_TEXT)
    assert use_kernels(network) is None
    assert not network.blocks[0].fused


@pytest.mark.parametrize("variant", ["adaln", "adaln-single"])
def test_tokens_keep_their_type_under_autocast(variant: Any) -> None:
    block = Block(replace(TINY, variant=variant))
    h, signal = random("cpu", (2, 8, 48), (2, 48) if variant == "adaln" else (6, 2, 48), dtype=torch.bfloat16)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert block(h, signal, None, None).dtype == torch.bfloat16


@pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="needs torchao: NOT TESTED HERE")
def test_the_long_products_of_a_block_are_of_eight_bits() -> None:
    """Names and types of the weights stay; output and gradients are off by rounding, and are rounded."""
    network = DiT(WITH_TEXT, torch.Generator().manual_seed(0))
    kept, block = {name: value.clone() for name, value in network.state_dict().items()}, network.blocks[0]
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)) * 0.1)
    inputs = random("cpu", (2, 8, 48), (6, 2, 48))
    (text,) = random("cpu", (2, 5, 48))
    truth = with_gradients(lambda h, signal: block(h, signal, text, None), inputs)
    to_float8(network, emulate=True)
    with torch.autocast("cpu", torch.bfloat16):
        found = with_gradients(lambda h, signal: block(h, signal, text, None), inputs)
    assert {name: value.dtype for name, value in network.state_dict().items()} == dict.fromkeys(kept, torch.float32)
    assert [type(m).__name__ for m in (block.attention.qkv, block.attention.out)] == ["Float8Linear", "Linear"]
    for a, b in zip(found, truth, strict=True):
        agree(a, b.double(), 0.15)
