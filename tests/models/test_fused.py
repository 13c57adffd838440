"""The fused kernels compute the plain formulas and their gradients: interpreted on a CPU, for real on CUDA.

Triton's interpreter is chosen when Triton is imported, so the interpreted checks run in a process of their own.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from atoll import kernels
from atoll.kernels import attention, float8
from atoll.kernels.attention import LONGEST_ATTENTION
from atoll.models import dit
from atoll.models.dit import Block, DiTConfig

EPS = 1e-6
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


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


def agree(ours: Callable[..., Any], plain: Callable[..., Any], inputs: list[Tensor], tolerance: float) -> None:
    """Outputs and gradients of ours are those of the plain formula in float64, up to |difference| / |truth|."""
    found = with_gradients(ours, inputs)
    truth = with_gradients(plain, [x.double() for x in inputs])
    for index, (a, b) in enumerate(zip(found, truth, strict=True)):
        assert a.shape == b.shape
        assert (a.double() - b).norm() <= tolerance * b.norm(), f"result {index}"


def with_gradients(function: Callable[..., Any], inputs: list[Tensor]) -> list[Tensor]:
    leaves = [x.detach().requires_grad_() for x in inputs]
    outputs = function(*leaves)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    generator = torch.Generator().manual_seed(5)
    weights = [torch.randn(y.shape, generator=generator).to(y) for y in outputs]
    return [*outputs, *torch.autograd.grad(outputs, leaves, weights)]


def random(device: str, *shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]


SIZES = [(2, 7, 48), (1, 65, 1152), (3, 1, 384), (2, 33, 20)]


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_norm_and_modulation(size: tuple[int, int, int], device: str) -> None:
    images, _tokens, width = size
    h, six = random(device, size, (images, 6, 1, width))
    agree(
        lambda h, six: kernels.norm_modulate(h, six[:, 3], six[:, 4], EPS),
        lambda h, six: plain_modulate(h, six[:, 3], six[:, 4]),
        [3 * h + 1, six],
        1e-6,
    )


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_norm_of_tokens_that_are_kept(size: tuple[int, int, int], device: str) -> None:
    images, _tokens, width = size
    h, six = random(device, size, (images, 6, 1, width))
    agree(
        lambda h, six: kernels.keep_and_norm(h, six[:, 3], six[:, 4], EPS),
        lambda h, six: (h + 0.0, plain_modulate(h, six[:, 3], six[:, 4])),
        [3 * h + 1, six],
        1e-6,
    )


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_a_branch_joins_and_the_sum_is_normed(size: tuple[int, int, int], gated: bool, device: str) -> None:
    images, _tokens, width = size
    h, branch, six, bias = random(device, size, size, (images, 6, 1, width), (width,))

    def ours(h: Tensor, branch: Tensor, six: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        return kernels.add_norm_modulate(h, branch, six[:, 2] if gated else None, six[:, 3], six[:, 4], EPS, bias)

    def plain(h: Tensor, branch: Tensor, six: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        branch = holding(branch, bias)
        h = h + (six[:, 2] * branch if gated else branch)
        return h, plain_modulate(h, six[:, 3], six[:, 4])

    agree(ours, plain, [h, branch, six, bias], 1e-6)


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_a_branch_joins(size: tuple[int, int, int], device: str) -> None:
    images, _tokens, width = size
    h, branch, six, bias = random(device, size, size, (images, 6, 1, width), (width,))
    agree(
        lambda h, branch, six, bias: kernels.gated_add(h, six[:, 5], branch, bias),
        lambda h, branch, six, bias: h + six[:, 5] * holding(branch, bias),
        [h, branch, six, bias],
        1e-6,
    )


@pytest.mark.parametrize("size", [(2, 7, 48), (1, 3, 1030), (140, 24)], ids=str)
def test_gelu_backward(size: tuple[int, ...], device: str) -> None:
    x, dy, bias = random(device, size, size, size[-1:])
    wide = (3 * x).double().requires_grad_(), bias.double().requires_grad_()
    y = F.gelu(holding(*wide), approximate="tanh")
    dx, dbias = torch.autograd.grad(y, wide, dy.double())
    for ours, truth in zip(kernels.gelu_backward(dy, 3 * x), (dx, y, dbias), strict=True):
        assert (ours.double() - truth).norm() <= 1e-6 * truth.norm()


@pytest.fixture
def eight_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter rounds numbers up to half of what they are (3.6.0): there the codes stay float32."""
    if INTERPRETED:
        monkeypatch.setattr(float8, "FLOAT8", torch.float32)
        monkeypatch.setattr(float8, "product", wide_product)


def wide_product(
    x: tuple[Tensor, Tensor], weight: tuple[Tensor, Tensor], dtype: torch.dtype, bias: Tensor | None = None
) -> Tensor:
    (codes, scale), (weight_codes, weight_scale) = x, weight
    assert max(codes.abs().max(), weight_codes.abs().max()) <= 448.001 or not scale.isfinite().all()
    answer = (codes * scale) @ (weight_codes * weight_scale).t()
    return (answer if bias is None else answer + bias.to(answer.dtype)).to(dtype)


@pytest.mark.usefixtures("eight_bits")
@pytest.mark.parametrize("gelu", [False, True])
@pytest.mark.parametrize("size", [(3, 48), (2, 1030), (5, 16)], ids=str)
def test_rows_of_eight_bits(size: tuple[int, int], gelu: bool, device: str) -> None:
    """Each row by its own scale: within half a step of three bits of mantissa, a row of zeros included."""
    (x,) = random(device, size)
    x = x * torch.logspace(-6, 6, len(x), device=device)[:, None]
    x[1] = 0.0
    codes, scale = float8.float8_rows(x, gelu=gelu)
    truth = (F.gelu(x.double(), approximate="tanh") if gelu else x.double()).cpu()
    found = codes.cpu().double() * scale.cpu().double()
    smallest = scale.cpu().double() * 2.0**-10  # below 2^-6 numbers have one step of 2^-9
    assert ((found - truth).abs() <= 1.001 * (truth.abs() * 2.0**-4 + smallest)).all()
    assert (codes.cpu().float().abs().amax(1)[truth.abs().amax(1) > 0] - 448).abs().max() < 1e-3


@pytest.mark.usefixtures("eight_bits")
def test_numbers_that_are_not_finite_are_not_hidden(device: str) -> None:
    (x,) = random(device, (3, 48))
    x[0, 5], x[2, 7] = torch.inf, torch.nan
    codes, scale = float8.float8_rows(x)
    (weight,) = random(device, (32, 48))
    y = float8.product((codes, scale), float8.float8_rows(weight), torch.bfloat16)
    assert y.isfinite().all(1).tolist() == [False, True, False]


@pytest.mark.usefixtures("eight_bits")
def test_maps_of_eight_bits_and_the_way_back(device: str) -> None:
    """The map and its input's gradient are off by what rounding makes them, and no more."""
    x, weight, bias, dy = random(device, (64, 160), (96, 160), (96,), (64, 96), dtype=torch.bfloat16)
    for found, truth in (
        (float8.mapped(x, weight, bias), F.linear(x.double(), weight.double(), bias.double())),
        (
            float8.mapped(x, weight, bias, gelu=True),
            F.linear(F.gelu(x.double(), approximate="tanh"), weight.double(), bias.double()),
        ),
        (float8.pulled(dy, weight), dy.double() @ weight.double()),
    ):
        assert found.dtype == torch.bfloat16
        assert (found.double() - truth).norm() <= 0.05 * truth.norm()


def test_images_may_share_a_vector(device: str) -> None:
    h, vector = random(device, (3, 5, 48), (1, 1, 48))
    agree(
        lambda h, v: kernels.gated_add(kernels.norm_modulate(h, v, v, EPS), v, h),
        lambda h, v: plain_modulate(h, v, v) + v * h,
        [h, vector],
        1e-6,
    )


def test_a_gradient_that_is_a_broadcast_number(device: str) -> None:
    """What .sum().backward() sends back has strides of 0."""
    h, six = (x.requires_grad_() for x in random(device, (2, 5, 32), (2, 6, 1, 32)))
    total, y = kernels.add_norm_modulate(h, h, None, six[:, 0], six[:, 1], EPS)
    (total.sum() + y.sum()).backward()
    assert six.grad is not None
    torch.testing.assert_close(six.grad[:, 0], torch.full_like(six.grad[:, 0], 5.0))


HEADS = [(2, 20, 5, 2, 24), (1, 65, 77, 2, 72), (1, 256, 130, 1, 72), (2, 17, 16, 1, 64), (2, 16, 40, 1, 128)]


@pytest.mark.parametrize("size", HEADS, ids=str)
def test_self_attention(size: tuple[int, int, int, int, int], device: str) -> None:
    images, tokens, _keys, heads, head = size
    qkv, bias = random(device, (images, tokens, 3, heads, head), (3 * heads * head,), dtype=torch.float16)
    agree(
        kernels.self_attention,
        lambda qkv, bias: plain_attention(*holding(qkv, bias).unbind(2), None),
        [qkv, bias],
        2e-3,
    )


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("size", HEADS, ids=str)
def test_cross_attention(size: tuple[int, int, int, int, int], masked: bool, device: str) -> None:
    images, tokens, keys, heads, head = size
    shapes = (images, tokens, heads, head), (images, keys, 2, heads, head), (heads * head,), (2 * heads * head,)
    inputs = random(device, *shapes, dtype=torch.float16)
    mask = None
    if masked:
        mask = (torch.rand(images, keys, generator=torch.Generator().manual_seed(2)) < 0.4).to(device)
        mask[:, : keys // 2] = False  # a whole block of keys may be forbidden
        mask[:, -2:] = True
    agree(
        lambda q, kv, q_bias, kv_bias: kernels.cross_attention(q, kv, mask, q_bias, kv_bias),
        lambda q, kv, q_bias, kv_bias: plain_attention(holding(q, q_bias), *holding(kv, kv_bias).unbind(2), mask),
        inputs,
        2e-3,
    )


def test_sizes_without_a_kernel_are_refused() -> None:
    with pytest.raises(AssertionError, match="no kernel"):
        kernels.self_attention(torch.zeros(1, LONGEST_ATTENTION + 1, 3, 1, 64))
    q, kv = torch.zeros(2, 4, 1, 64), torch.zeros(2, 5, 2, 1, 64)
    with pytest.raises(AssertionError, match="no kernel"):
        kernels.cross_attention(q, torch.zeros(2, LONGEST_ATTENTION + 1, 2, 1, 64), None)
    with pytest.raises(AssertionError, match="keys and values"):
        kernels.cross_attention(q, kv[:1], None)
    with pytest.raises(AssertionError, match="mask"):
        kernels.cross_attention(q, kv, torch.ones(2, 4, dtype=torch.bool))
    with pytest.raises(AssertionError, match="branch"):
        kernels.gated_add(torch.zeros(2, 4, 8), torch.zeros(2, 1, 8), torch.zeros(2, 3, 8))


def test_a_program_has_the_warps_its_numbers_need() -> None:
    tile = kernels.Tile(numbers=512, warps=1, run=32)
    cuts = [tile.of(64, width) for width in (48, 384, 768, 1152)]
    assert [(cut["ROWS"], cut["num_warps"]) for cut in cuts] == [(8, 1), (1, 1), (1, 2), (1, 4)]
    assert kernels.Tile(numbers=4096, warps=4).of(64, 384)["num_warps"] == 4


@pytest.mark.usefixtures("eight_bits")
@pytest.mark.parametrize("rounded", [False, True])
@pytest.mark.parametrize("condition", ["none", "tokens"])
@pytest.mark.parametrize("variant", ["adaln", "adaln-single"])
def test_a_block_is_the_same_block(
    variant: Any, condition: Any, rounded: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fused or plain, a whole block has the same answer and the same gradients, masked text included.

    With products of 8 bits it has them up to rounding: closer than 15 %, and not as close as without.
    """
    config = DiTConfig(latent=(3, 4, 8), patch=2, width=48, depth=1, heads=2, variant=variant)
    if condition == "tokens":
        config = replace(config, condition="tokens", text_width=6, text_length=5)
    block = Block(config).to(device)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    h, signal, text = random(device, (3, 8, 48), (3, 48) if variant == "adaln" else (6, 3, 48), (3, 5, 48))
    mask = torch.tensor([[1, 1, 0, 0, 0], [1, 1, 1, 1, 1], [0, 0, 0, 1, 0]], device=device).bool()[:, None, None]

    def run(h: Tensor, signal: Tensor, text: Tensor, *_weights: Tensor) -> tuple[Tensor, ...]:
        y = block(h, signal, text if block.cross else None, mask if block.cross else None)
        return (
            y + 0.0 * text.sum(),
            *torch.autograd.grad(y.square().sum(), list(block.parameters()), retain_graph=True),
        )

    monkeypatch.setattr(kernels, "available", lambda h: False)
    plain = run(*(x.requires_grad_() for x in (h, signal, text)))
    plain += torch.autograd.grad(plain[0].square().sum(), (h, signal, text))
    monkeypatch.setattr(kernels, "available", lambda h: True)
    monkeypatch.setattr(attention, "available", lambda h: True)
    monkeypatch.setattr(attention, "HALF_TYPES", (torch.float32,))  # attention too, at the precision of this test
    block.float8 = rounded
    ours = run(h, signal, text)
    ours += torch.autograd.grad(ours[0].square().sum(), (h, signal, text))
    errors = [((a - b).norm() / b.norm()).item() for a, b in zip(ours, plain, strict=True) if b.any()]
    assert max(errors) <= (0.15 if rounded else 1e-4)
    if rounded and not INTERPRETED:
        assert max(errors) >= 1e-3, "nothing was rounded"


def holding(held: Tensor, bias: Tensor) -> Tensor:
    """The same numbers, as a function of the bias they already hold."""
    own = {4: 2, 5: 3}.get(held.ndim, 1)  # heads are dimensions of their own
    return held + (bias - bias.detach()).reshape(held.shape[-own:])


def plain_modulate(h: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    mean, variance = h.mean(-1, keepdim=True), h.var(-1, keepdim=True, unbiased=False)
    return (h - mean) / (variance + EPS).sqrt() * (1 + scale) + shift


def plain_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """[B, N, H, d] each -> [B, N, H d]."""
    scores = torch.einsum("bnhd,blhd->bhnl", q, k) * q.shape[-1] ** -0.5
    if mask is not None:
        scores = scores.masked_fill(~mask[:, None, None], -torch.inf)
    return torch.einsum("bhnl,blhd->bnhd", scores.softmax(-1), v).flatten(2)


@pytest.mark.skipif(INTERPRETED, reason="about the plain path")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_on_a_cpu_a_block_is_the_plain_formula_to_the_bit(dtype: torch.dtype) -> None:
    """The block as it was before there were kernels, written out."""
    config = DiTConfig(
        latent=(3, 4, 8), patch=2, width=48, depth=1, heads=2, condition="tokens", text_width=6, text_length=5
    )
    block = Block(config).to(dtype)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.normal_(0.0, 0.2, generator=generator)
    h, signal, text = random("cpu", (3, 8, 48), (6, 3, 48), (3, 5, 48), dtype=dtype)
    mask = torch.tensor([[1, 1, 0, 0, 0], [1, 1, 1, 1, 1], [0, 0, 0, 1, 0]]).bool()[:, None, None]
    assert not kernels.available(h)
    assert block.cross is not None

    shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = (signal + block.table[:, None])[:, :, None].unbind(0)
    y = torch.addcmul(shift, F.layer_norm(h, (48,), eps=EPS), 1.0 + scale)
    q, k, v = dit.split_heads(block.attention.qkv(y), 3, 2)
    attended = block.attention.out(dit.join_heads(F.scaled_dot_product_attention(q, k, v)))
    wanted = torch.addcmul(h, gate, attended)
    (q,), (k, v) = dit.split_heads(block.cross.q(wanted), 1, 2), dit.split_heads(block.cross.kv(text), 2, 2)
    wanted = wanted + block.cross.out(dit.join_heads(F.scaled_dot_product_attention(q, k, v, attn_mask=mask)))
    y = torch.addcmul(mlp_shift, F.layer_norm(wanted, (48,), eps=EPS), 1.0 + mlp_scale)
    wanted = torch.addcmul(wanted, mlp_gate, block.mlp(y))
    assert torch.equal(block(h, signal, text, mask), wanted)


@pytest.mark.skipif(INTERPRETED, reason="about the plain path")
@pytest.mark.parametrize("variant", ["adaln", "adaln-single"])
def test_tokens_keep_their_type_under_autocast(variant: Any) -> None:
    block = Block(DiTConfig(latent=(3, 4, 8), patch=2, width=32, depth=1, heads=2, variant=variant))
    h, signal = random("cpu", (2, 8, 32), (2, 32) if variant == "adaln" else (6, 2, 32), dtype=torch.bfloat16)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert block(h, signal, None, None).dtype == torch.bfloat16


@pytest.mark.skipif(INTERPRETED or not torch.cuda.is_available(), reason="needs CUDA: NOT TESTED HERE")
@pytest.mark.parametrize("rounded", [False, True])
@pytest.mark.parametrize("condition", ["none", "tokens"])
def test_a_block_compiles_into_one_graph_on_cuda(condition: Any, rounded: bool) -> None:
    """Under bfloat16 autocast, compiled, fused: within bfloat16's or float8's error of the plain block in float32."""
    config = DiTConfig(latent=(4, 32, 32), patch=2, width=144, depth=1, heads=2)
    if condition == "tokens":
        config = replace(config, condition="tokens", text_width=6, text_length=77)
    torch.manual_seed(0)
    block = Block(config).cuda()
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.normal_(0.0, 0.05)
    h, signal, text = random("cuda", (3, 256, 144), (6, 3, 144), (3, 77, 144))
    mask = (torch.arange(77, device="cuda") < torch.tensor([[1], [40], [77]], device="cuda"))[:, None, None]
    compiled = torch.compile(block, fullgraph=True, dynamic=False)

    def step(run: Callable[..., Tensor], dtype: torch.dtype) -> list[Tensor]:
        leaves = [x.to(dtype).requires_grad_() for x in (h, signal, text)]
        y = run(*leaves[:2], leaves[2] if block.cross else None, mask if block.cross else None)
        wanted = [*leaves[: 3 if block.cross else 2], *block.parameters()]
        return [y, *torch.autograd.grad(y, wanted, h.to(y.dtype))]

    truth = step(block, torch.float32)
    block.float8 = rounded
    with pytest.MonkeyPatch.context() as patch, torch.autocast("cuda", torch.bfloat16):
        patch.setattr(kernels.Switch, "on", True)
        found = step(compiled, torch.bfloat16)
    for index, (a, b) in enumerate(zip(found, truth, strict=True)):
        assert (a.float() - b).norm() <= (0.12 if rounded else 0.03) * b.norm(), f"result {index}"
