"""Norms, residuals and the MLP's activation, each as one pass over the tokens.

B images, N tokens, D width; h, branch and y [B, N, D]; gate, shift and scale [B, 1, D]; sums over n run over an image's
tokens, means over d over a token's D numbers. Norm and modulation, norm_modulate:

    x = (h - m) r,   m = mean_d h,   r = (mean_d (h - m)^2 + eps)^-1/2
    y = x (1 + scale) + shift

    g = dy (1 + scale)
    dh = r (g - mean_d g - x mean_d(g x)),   dshift = sum_n dy,   dscale = sum_n dy x

keep_and_norm: the same, and h itself, so that what comes back for h on the other way is added in the same pass.

Residual before it, add_norm_modulate: h' = h + gate branch (gate None: 1), y of h'. With d' = dh' + (dh of above)

    dh = d',   dbranch = gate d',   dgate = sum_n d' branch,   dbias = sum_bn dbranch

Residual alone, gated_add: h' = h + gate branch, the same with d' = dh'. `bias` [D] is that of the linear map a branch
comes from. The branch holds it already: it changes nothing here but gets its gradient, for which torch would read
dbranch again.

The activation's backward pass, gelu_backward, for the same reason: y = x w, w = 1 / (1 + exp(-2 u)),
u = (2 / pi)^1/2 (x + 0.044715 x^3), which is GELU in its tanh form;

    dx = dy (w + 2 x w (1 - w) du/dx),   dbias = sum_bn dx

It also makes y again, which the next weights' gradient wants and nobody had to keep.

A forward program takes a few tokens of one image. A backward program takes a longer run of them
and adds up its share of the sums over n in registers, each of its rows for itself until the end (no thread waits for
another in the loop, but for a token's own means): [B, runs, D] float32, added by torch afterwards. m and r are
kept, 8 bytes a token; x is made again from h.
"""

# Triton reads the annotations of kernels; they can say nothing of pointers
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .launch import differentiate, kernel, operator, power_of_two, tl, wrap_triton


@dataclass(frozen=True)
class Tile:
    """How a norm kernel cuts its work. Fixed, not tuned at run time: sums must not depend on what else ran.

    numbers   of one tensor that a program holds at once: tokens x (D rounded up to a power of two); a token at least
    warps     of 32 threads for so many numbers: a program with more of them has more warps
    run       tokens per program, for backward kernels (rounded up to whole tiles)
    """

    numbers: int
    warps: int
    run: int = 0

    def of(self, tokens: int, width: int) -> dict[str, int]:
        """The kernel's sizes for images of `tokens` tokens of `width` numbers."""
        block = power_of_two(width)
        rows = max(1, min(self.numbers // block, power_of_two(tokens), 16))
        warps = min(self.warps * max(1, block // self.numbers), 32)
        sizes = {"WIDTH": width, "BLOCK": block, "ROWS": rows, "num_warps": warps}
        if self.run:
            sizes["RUN"] = rows * -(-min(self.run, tokens) // rows)
        return sizes


TILES = {
    "norm": Tile(numbers=4096, warps=4),
    "norm_backward": Tile(numbers=512, warps=1, run=32),  # sums along a token: the fewer warps share it, the better
    "add": Tile(numbers=4096, warps=4),
    "add_backward": Tile(numbers=4096, warps=4, run=32),
    "gelu_backward": Tile(numbers=2048, warps=4, run=32),
}
GELU_COLUMNS = 512  # a program of gelu's takes this many columns: there is no sum along a row


# ---------------------------------------------------------------------------------------------------------------
# Kernels. `HAS_...` and capitals are known when the kernel is compiled; a pointer that a case does not use is given
# any tensor. Offsets within an image are 32-bit, the image's own is 64-bit.


@kernel
def norm_kernel(
    h_ptr,
    branch_ptr,
    gate_ptr,
    shift_ptr,
    scale_ptr,
    sum_ptr,
    y_ptr,
    mean_ptr,
    rstd_ptr,
    TOKENS: tl.constexpr,
    EPS: tl.constexpr,
    HAS_BRANCH: tl.constexpr,
    HAS_GATE: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    runs = (TOKENS + ROWS - 1) // ROWS
    image = tl.program_id(0) // runs
    rows = (tl.program_id(0) % runs) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    there = columns < WIDTH
    inside = (rows < TOKENS)[:, None] & there[None, :]
    start = image.to(tl.int64) * (TOKENS * WIDTH)
    places = rows[:, None] * WIDTH + columns[None, :]

    h = tl.load(h_ptr + start + places, mask=inside, other=0.0).to(tl.float32)
    if HAS_BRANCH:
        branch = tl.load(branch_ptr + start + places, mask=inside, other=0.0).to(tl.float32)
        if HAS_GATE:
            branch *= tl.load(gate_ptr + image * WIDTH + columns, mask=there, other=0.0).to(tl.float32)[None, :]
        # normalize what the next reader will see: the sum as it is stored
        stored = (h + branch).to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + start + places, stored, mask=inside)
        h = stored.to(tl.float32)

    mean = tl.sum(h, axis=1) / WIDTH
    centred = tl.where(there[None, :], h - mean[:, None], 0.0)
    rstd = 1.0 / tl.sqrt(tl.sum(centred * centred, axis=1) / WIDTH + EPS)
    tl.store(mean_ptr + image * TOKENS + rows, mean, mask=rows < TOKENS)
    tl.store(rstd_ptr + image * TOKENS + rows, rstd, mask=rows < TOKENS)

    scale = tl.load(scale_ptr + image * WIDTH + columns, mask=there, other=0.0).to(tl.float32)
    shift = tl.load(shift_ptr + image * WIDTH + columns, mask=there, other=0.0).to(tl.float32)
    y = centred * rstd[:, None] * (1.0 + scale)[None, :] + shift[None, :]
    tl.store(y_ptr + start + places, y.to(y_ptr.dtype.element_ty), mask=inside)


@kernel
def norm_backward_kernel(
    dsum_ptr,
    dy_ptr,
    h_ptr,
    branch_ptr,
    gate_ptr,
    scale_ptr,
    mean_ptr,
    rstd_ptr,
    dh_ptr,
    dbranch_ptr,
    dgate_ptr,
    dbias_ptr,
    dshift_ptr,
    dscale_ptr,
    TOKENS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_GATE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    RUN: tl.constexpr,
):
    runs = (TOKENS + RUN - 1) // RUN
    image = tl.program_id(0) // runs
    first = (tl.program_id(0) % runs) * RUN
    columns = tl.arange(0, BLOCK)
    there = columns < WIDTH
    start = image.to(tl.int64) * (TOKENS * WIDTH)

    slope = 1.0 + tl.load(scale_ptr + image * WIDTH + columns, mask=there, other=0.0).to(tl.float32)
    dshift = tl.zeros([ROWS, BLOCK], tl.float32)
    dscale = tl.zeros([ROWS, BLOCK], tl.float32)
    if HAS_BIAS:
        dbias = tl.zeros([ROWS, BLOCK], tl.float32)
    if HAS_GATE:
        gate = tl.load(gate_ptr + image * WIDTH + columns, mask=there, other=0.0).to(tl.float32)
        dgate = tl.zeros([ROWS, BLOCK], tl.float32)

    for row in range(0, RUN, ROWS):
        rows = first + row + tl.arange(0, ROWS)
        inside = (rows < TOKENS)[:, None] & there[None, :]
        places = rows[:, None] * WIDTH + columns[None, :]
        dy = tl.load(dy_ptr + start + places, mask=inside, other=0.0).to(tl.float32)
        h = tl.load(h_ptr + start + places, mask=inside, other=0.0).to(tl.float32)
        mean = tl.load(mean_ptr + image * TOKENS + rows, mask=rows < TOKENS, other=0.0)
        rstd = tl.load(rstd_ptr + image * TOKENS + rows, mask=rows < TOKENS, other=0.0)
        if HAS_RESIDUAL:  # all is asked for before anything is waited for
            dsum = tl.load(dsum_ptr + start + places, mask=inside, other=0.0).to(tl.float32)
        if HAS_GATE:
            branch = tl.load(branch_ptr + start + places, mask=inside, other=0.0).to(tl.float32)

        x = (h - mean[:, None]) * rstd[:, None]  # beyond D it is not 0, but dy and g are
        g = dy * slope[None, :]
        dshift += dy
        dscale += dy * x
        mean_g = tl.sum(g, axis=1) / WIDTH
        mean_gx = tl.sum(g * x, axis=1) / WIDTH
        dh = rstd[:, None] * (g - mean_g[:, None] - x * mean_gx[:, None])
        if HAS_RESIDUAL:
            dh += dsum
        if HAS_BIAS:
            dbias += tl.where(inside, dh, 0.0)  # beyond D dh is not 0
        tl.store(dh_ptr + start + places, dh.to(dh_ptr.dtype.element_ty), mask=inside)
        if HAS_GATE:
            dgate += dh * branch
            dbranch = dh * gate[None, :]
            tl.store(dbranch_ptr + start + places, dbranch.to(dbranch_ptr.dtype.element_ty), mask=inside)

    share = tl.program_id(0) * WIDTH + columns
    tl.store(dshift_ptr + share, tl.sum(dshift, axis=0), mask=there)
    tl.store(dscale_ptr + share, tl.sum(dscale, axis=0), mask=there)
    if HAS_GATE:
        tl.store(dgate_ptr + share, tl.sum(dgate, axis=0), mask=there)
    if HAS_BIAS:
        bias_share = tl.sum(dbias, axis=0)
        if HAS_GATE:
            bias_share *= gate
        tl.store(dbias_ptr + share, bias_share, mask=there)


@kernel
def add_kernel(
    h_ptr,
    branch_ptr,
    gate_ptr,
    sum_ptr,
    TOKENS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    runs = (TOKENS + ROWS - 1) // ROWS
    image = tl.program_id(0) // runs
    rows = (tl.program_id(0) % runs) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    there = columns < WIDTH
    inside = (rows < TOKENS)[:, None] & there[None, :]
    start = image.to(tl.int64) * (TOKENS * WIDTH)
    places = rows[:, None] * WIDTH + columns[None, :]

    h = tl.load(h_ptr + start + places, mask=inside, other=0.0).to(tl.float32)
    branch = tl.load(branch_ptr + start + places, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + image * WIDTH + columns, mask=there, other=0.0).to(tl.float32)
    tl.store(sum_ptr + start + places, (h + gate[None, :] * branch).to(sum_ptr.dtype.element_ty), mask=inside)


@kernel
def add_backward_kernel(
    dsum_ptr,
    branch_ptr,
    gate_ptr,
    dbranch_ptr,
    dgate_ptr,
    dbias_ptr,
    TOKENS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    RUN: tl.constexpr,
):
    runs = (TOKENS + RUN - 1) // RUN
    image = tl.program_id(0) // runs
    first = (tl.program_id(0) % runs) * RUN
    columns = tl.arange(0, BLOCK)
    there = columns < WIDTH
    start = image.to(tl.int64) * (TOKENS * WIDTH)

    gate = tl.load(gate_ptr + image * WIDTH + columns, mask=there, other=0.0).to(tl.float32)
    dgate = tl.zeros([ROWS, BLOCK], tl.float32)
    if HAS_BIAS:
        dbias = tl.zeros([ROWS, BLOCK], tl.float32)
    for row in range(0, RUN, ROWS):
        rows = first + row + tl.arange(0, ROWS)
        inside = (rows < TOKENS)[:, None] & there[None, :]
        places = rows[:, None] * WIDTH + columns[None, :]
        dsum = tl.load(dsum_ptr + start + places, mask=inside, other=0.0).to(tl.float32)
        branch = tl.load(branch_ptr + start + places, mask=inside, other=0.0).to(tl.float32)
        dgate += dsum * branch
        if HAS_BIAS:
            dbias += dsum
        tl.store(dbranch_ptr + start + places, (dsum * gate[None, :]).to(dbranch_ptr.dtype.element_ty), mask=inside)
    share = tl.program_id(0) * WIDTH + columns
    tl.store(dgate_ptr + share, tl.sum(dgate, axis=0), mask=there)
    if HAS_BIAS:
        tl.store(dbias_ptr + share, tl.sum(dbias, axis=0) * gate, mask=there)


@kernel
def gelu_backward_kernel(
    dy_ptr,
    x_ptr,
    dx_ptr,
    y_ptr,
    dbias_ptr,
    TOKENS: tl.constexpr,
    TOTAL: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    RUN: tl.constexpr,
):
    """TOTAL numbers in a row, of which a program takes BLOCK; WIDTH is BLOCK's, as a tile has it."""
    pieces: tl.constexpr = (TOTAL + BLOCK - 1) // BLOCK
    run = tl.program_id(0) // pieces
    columns = (tl.program_id(0) % pieces) * BLOCK + tl.arange(0, BLOCK)
    dbias = tl.zeros([ROWS, BLOCK], tl.float32)
    for row in range(0, RUN, ROWS):
        rows = run.to(tl.int64) * RUN + row + tl.arange(0, ROWS)
        inside = (rows < TOKENS)[:, None] & (columns < TOTAL)[None, :]
        places = rows[:, None] * TOTAL + columns[None, :]
        x = tl.load(x_ptr + places, mask=inside, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + places, mask=inside, other=0.0).to(tl.float32)
        u = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        w = 1.0 / (1.0 + tl.exp(-2.0 * u))
        slope = 0.7978845608028654 * (1.0 + 0.134145 * x * x)
        dx = dy * (w + 2.0 * x * w * (1.0 - w) * slope)
        dbias += dx
        tl.store(dx_ptr + places, dx.to(dx_ptr.dtype.element_ty), mask=inside)
        tl.store(y_ptr + places, (x * w).to(y_ptr.dtype.element_ty), mask=inside)
    tl.store(dbias_ptr + run * TOTAL + columns, tl.sum(dbias, axis=0), mask=columns < TOTAL)


# ---------------------------------------------------------------------------------------------------------------
# norm_modulate


def norm_modulate(h: Tensor, shift: Tensor, scale: Tensor, eps: float) -> Tensor:
    """LayerNorm(h) (1 + scale) + shift, in h's type."""
    y: Tensor = _norm_modulate(h.contiguous(), per_image(shift, h), per_image(scale, h), eps)[0]
    return y


@operator("norm_modulate")
def _norm_modulate(h: Tensor, shift: Tensor, scale: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """y, and each token's mean and 1 / deviation, float32 [B, N]."""
    images, tokens, width = h.shape
    sizes = TILES["norm"].of(tokens, width)
    y, mean, rstd = torch.empty_like(h), *token_numbers(h, 2)
    # contiguous: a view's strides, read while tracing, need not be those inductor gives it later
    wrap_triton(norm_kernel)[(images * -(-tokens // sizes["ROWS"]),)](
        h_ptr=h,
        branch_ptr=h,
        gate_ptr=h,
        shift_ptr=shift.contiguous(),
        scale_ptr=scale.contiguous(),
        sum_ptr=h,
        y_ptr=y,
        mean_ptr=mean,
        rstd_ptr=rstd,
        TOKENS=tokens,
        EPS=eps,
        HAS_BRANCH=False,
        HAS_GATE=False,
        **sizes,
    )
    return y, mean, rstd


@operator("norm_modulate_backward")
def _norm_modulate_backward(
    dy: Tensor, h: Tensor, scale: Tensor, mean: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """dh, and the shares of dshift and dscale, float32 [B, runs, D]."""
    images, tokens, width = h.shape
    sizes = TILES["norm_backward"].of(tokens, width)
    dh, dshift, dscale = torch.empty_like(h), *run_shares(h, sizes, 2)
    wrap_triton(norm_backward_kernel)[(images * dshift.shape[1],)](
        dsum_ptr=dy,
        dy_ptr=dy,
        h_ptr=h,
        branch_ptr=h,
        gate_ptr=h,
        scale_ptr=scale.contiguous(),
        mean_ptr=mean,
        rstd_ptr=rstd,
        dh_ptr=dh,
        dbranch_ptr=dy,
        dgate_ptr=dy,
        dbias_ptr=dy,
        dshift_ptr=dshift,
        dscale_ptr=dscale,
        TOKENS=tokens,
        HAS_RESIDUAL=False,
        HAS_GATE=False,
        HAS_BIAS=False,
        **sizes,
    )
    return dh, dshift, dscale


def _norm_modulate_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    h, shift, scale, _eps = inputs
    ctx.save_for_backward(h, scale, *output[1:])
    ctx.types = shift.dtype, scale.dtype


def _norm_modulate_gradient(ctx: Any, dy: Tensor, _dmean: Any, _drstd: Any) -> tuple[Tensor | None, ...]:
    dh, dshift, dscale = _norm_modulate_backward(dy.contiguous(), *ctx.saved_tensors)
    return dh, over_tokens(dshift, ctx.types[0]), over_tokens(dscale, ctx.types[1]), None


differentiate(_norm_modulate, _norm_modulate_gradient, _norm_modulate_context)


def keep_and_norm(h: Tensor, shift: Tensor, scale: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """h itself and LayerNorm(h) (1 + scale) + shift: the gradients of both reach h in one pass."""
    kept, y = _KeepAndNorm.apply(  # type: ignore[no-untyped-call]
        h.contiguous(), per_image(shift, h), per_image(scale, h), eps
    )
    return kept, y


class _KeepAndNorm(torch.autograd.Function):
    """Not an operator: an operator may not give back what it was given."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, shift: Tensor, scale: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        y, mean, rstd = _norm_modulate(h, shift, scale, eps)
        ctx.save_for_backward(h, scale, mean, rstd)
        ctx.types = shift.dtype, scale.dtype
        return h.view_as(h), y

    @staticmethod
    def backward(ctx: Any, dkept: Tensor, dy: Tensor) -> tuple[Tensor | None, ...]:
        found = _add_norm_modulate_backward(dkept.contiguous(), dy.contiguous(), False, *ctx.saved_tensors)
        dh, dshift, dscale, _no_bias = found
        return dh, over_tokens(dshift, ctx.types[0]), over_tokens(dscale, ctx.types[1]), None


# ---------------------------------------------------------------------------------------------------------------
# add_norm_modulate


def add_norm_modulate(
    h: Tensor,
    branch: Tensor,
    gate: Tensor | None,
    shift: Tensor,
    scale: Tensor,
    eps: float,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """h' = h + gate branch (None: h + branch) and y = LayerNorm(h') (1 + scale) + shift, both in h's type.

    bias [D] is one that `branch` holds already, detached: its gradient comes from here.
    """
    assert branch.shape == h.shape, f"branch {list(branch.shape)}, tokens {list(h.shape)}"
    gate = None if gate is None else per_image(gate, h)
    shift, scale = per_image(shift, h), per_image(scale, h)
    total, y, _mean, _rstd = _add_norm_modulate(h.contiguous(), branch.contiguous(), gate, shift, scale, eps, bias)
    return total, y


@operator("add_norm_modulate")
def _add_norm_modulate(
    h: Tensor, branch: Tensor, gate: Tensor | None, shift: Tensor, scale: Tensor, eps: float, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """h', y, and each token's mean and 1 / deviation, float32 [B, N]."""
    images, tokens, width = h.shape
    sizes = TILES["norm"].of(tokens, width)
    total, y, mean, rstd = torch.empty_like(h), torch.empty_like(h), *token_numbers(h, 2)
    wrap_triton(norm_kernel)[(images * -(-tokens // sizes["ROWS"]),)](
        h_ptr=h,
        branch_ptr=branch,
        gate_ptr=h if gate is None else gate.contiguous(),
        shift_ptr=shift.contiguous(),
        scale_ptr=scale.contiguous(),
        sum_ptr=total,
        y_ptr=y,
        mean_ptr=mean,
        rstd_ptr=rstd,
        TOKENS=tokens,
        EPS=eps,
        HAS_BRANCH=True,
        HAS_GATE=gate is not None,
        **sizes,
    )
    return total, y, mean, rstd


@operator("add_norm_modulate_backward")
def _add_norm_modulate_backward(
    dsum: Tensor, dy: Tensor, biased: bool, total: Tensor, scale: Tensor, mean: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Without a gate: d' (that is dh and dbranch both), and the shares of dshift, dscale and, if `biased`, dbias."""
    images, tokens, width = total.shape
    sizes = TILES["norm_backward"].of(tokens, width)
    dh, dshift, dscale = torch.empty_like(total), *run_shares(total, sizes, 2)
    dbias = torch.empty_like(dshift if biased else dshift[:, :, :1])
    wrap_triton(norm_backward_kernel)[(images * dshift.shape[1],)](
        dsum_ptr=dsum,
        dy_ptr=dy,
        h_ptr=total,
        branch_ptr=total,
        gate_ptr=total,
        scale_ptr=scale.contiguous(),
        mean_ptr=mean,
        rstd_ptr=rstd,
        dh_ptr=dh,
        dbranch_ptr=dy,
        dgate_ptr=dy,
        dbias_ptr=dbias,
        dshift_ptr=dshift,
        dscale_ptr=dscale,
        TOKENS=tokens,
        HAS_RESIDUAL=True,
        HAS_GATE=False,
        HAS_BIAS=biased,
        **sizes,
    )
    return dh, dshift, dscale, dbias


@operator("add_gated_norm_modulate_backward")
def _add_gated_norm_modulate_backward(
    dsum: Tensor,
    dy: Tensor,
    biased: bool,
    total: Tensor,
    branch: Tensor,
    gate: Tensor,
    scale: Tensor,
    mean: Tensor,
    rstd: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """With a gate: dh, dbranch, and the shares of dgate, dshift, dscale and, if `biased`, dbias."""
    images, tokens, width = total.shape
    sizes = TILES["norm_backward"].of(tokens, width)
    dh, dbranch = torch.empty_like(total), torch.empty_like(branch)
    dgate, dshift, dscale = run_shares(total, sizes, 3)
    dbias = torch.empty_like(dshift if biased else dshift[:, :, :1])
    wrap_triton(norm_backward_kernel)[(images * dshift.shape[1],)](
        dsum_ptr=dsum,
        dy_ptr=dy,
        h_ptr=total,
        branch_ptr=branch,
        gate_ptr=gate.contiguous(),
        scale_ptr=scale.contiguous(),
        mean_ptr=mean,
        rstd_ptr=rstd,
        dh_ptr=dh,
        dbranch_ptr=dbranch,
        dgate_ptr=dgate,
        dbias_ptr=dbias,
        dshift_ptr=dshift,
        dscale_ptr=dscale,
        TOKENS=tokens,
        HAS_RESIDUAL=True,
        HAS_GATE=True,
        HAS_BIAS=biased,
        **sizes,
    )
    return dh, dbranch, dgate, dshift, dscale, dbias


def _add_norm_modulate_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _h, branch, gate, shift, scale, _eps, bias = inputs
    total, _y, mean, rstd = output
    ctx.gated = gate is not None
    ctx.save_for_backward(total, *((branch, gate) if ctx.gated else ()), scale, mean, rstd)
    ctx.types = [None if x is None else x.dtype for x in (branch, gate, shift, scale, bias)]


def _add_norm_modulate_gradient(
    ctx: Any, dsum: Tensor, dy: Tensor, _dmean: Any, _drstd: Any
) -> tuple[Tensor | None, ...]:
    dsum, dy = dsum.contiguous(), dy.contiguous()
    branch_type, gate_type, shift_type, scale_type, bias_type = ctx.types
    biased = bias_type is not None
    if ctx.gated:
        found = _add_gated_norm_modulate_backward(dsum, dy, biased, *ctx.saved_tensors)
        dh, dbranch, gates, shifts, scales, biases = found
    else:
        dh, shifts, scales, biases = _add_norm_modulate_backward(dsum, dy, biased, *ctx.saved_tensors)
        dbranch, gates = dh.to(branch_type), None
    dgate = None if gates is None else over_tokens(gates, gate_type)
    dbias = over_all(biases, bias_type) if biased else None
    return dh, dbranch, dgate, over_tokens(shifts, shift_type), over_tokens(scales, scale_type), None, dbias


differentiate(_add_norm_modulate, _add_norm_modulate_gradient, _add_norm_modulate_context)


# ---------------------------------------------------------------------------------------------------------------
# gated_add


def gated_add(h: Tensor, gate: Tensor, branch: Tensor, bias: Tensor | None = None) -> Tensor:
    """h + gate branch, in h's type. bias [D] is one that `branch` holds already, detached."""
    assert branch.shape == h.shape, f"branch {list(branch.shape)}, tokens {list(h.shape)}"
    total: Tensor = _gated_add(h.contiguous(), per_image(gate, h), branch.contiguous(), bias)
    return total


@operator("gated_add")
def _gated_add(h: Tensor, gate: Tensor, branch: Tensor, bias: Tensor | None) -> Tensor:
    images, tokens, width = h.shape
    sizes = TILES["add"].of(tokens, width)
    total = torch.empty_like(h)
    wrap_triton(add_kernel)[(images * -(-tokens // sizes["ROWS"]),)](
        h_ptr=h,
        branch_ptr=branch,
        gate_ptr=gate.contiguous(),
        sum_ptr=total,
        TOKENS=tokens,
        **sizes,
    )
    return total


@operator("gated_add_backward")
def _gated_add_backward(dsum: Tensor, biased: bool, gate: Tensor, branch: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """dbranch, and the shares of dgate and, if `biased`, dbias, float32 [B, runs, D]."""
    images, tokens, width = branch.shape
    sizes = TILES["add_backward"].of(tokens, width)
    dbranch, (dgate,) = torch.empty_like(branch), run_shares(branch, sizes, 1)
    dbias = torch.empty_like(dgate if biased else dgate[:, :, :1])
    wrap_triton(add_backward_kernel)[(images * dgate.shape[1],)](
        dsum_ptr=dsum,
        branch_ptr=branch,
        gate_ptr=gate.contiguous(),
        dbranch_ptr=dbranch,
        dgate_ptr=dgate,
        dbias_ptr=dbias,
        TOKENS=tokens,
        HAS_BIAS=biased,
        **sizes,
    )
    return dbranch, dgate, dbias


def _gated_add_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _h, gate, branch, bias = inputs
    ctx.save_for_backward(gate, branch)
    ctx.bias_type = None if bias is None else bias.dtype


def _gated_add_gradient(ctx: Any, dsum: Tensor) -> tuple[Tensor | None, ...]:
    gate, branch = ctx.saved_tensors
    dsum, biased = dsum.contiguous(), ctx.bias_type is not None
    dbranch, gates, biases = _gated_add_backward(dsum, biased, gate, branch)
    return dsum, over_tokens(gates, gate.dtype), dbranch, over_all(biases, ctx.bias_type) if biased else None


differentiate(_gated_add, _gated_add_gradient, _gated_add_context)


# ---------------------------------------------------------------------------------------------------------------
# gelu, backward


def gelu_backward(dy: Tensor, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """dx, GELU(x), both in x's type, and the gradient of a bias that x holds, float32 [W]; x and dy [.., W]."""
    dx, y, biases = _gelu_backward(dy.contiguous(), x.contiguous())
    return dx, y, over_all(biases, torch.float32)


@operator("gelu_backward")
def _gelu_backward(dy: Tensor, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """dx, y, and the shares of dbias, float32 [1, runs, W]."""
    width = x.shape[-1]
    tokens = x.numel() // width
    sizes = TILES["gelu_backward"].of(tokens, min(GELU_COLUMNS, power_of_two(width)))
    dx, y, (dbias,) = torch.empty_like(x), torch.empty_like(x), run_shares(x.reshape(1, tokens, width), sizes, 1)
    wrap_triton(gelu_backward_kernel)[(dbias.shape[1] * -(-width // sizes["BLOCK"]),)](
        dy_ptr=dy, x_ptr=x, dx_ptr=dx, y_ptr=y, dbias_ptr=dbias, TOKENS=tokens, TOTAL=width, **sizes
    )
    return dx, y, dbias


# ---------------------------------------------------------------------------------------------------------------


def per_image(vector: Tensor, h: Tensor) -> Tensor:
    """[B or 1, 1, D] -> [B, 1, D]: a kernel does not check what it reads."""
    return vector.expand(h.shape[0], 1, h.shape[2])


def token_numbers(h: Tensor, how_many: int) -> list[Tensor]:
    """Room for one float32 per token, [B, N]."""
    return [torch.empty(h.shape[:2], dtype=torch.float32, device=h.device) for _ in range(how_many)]


def run_shares(h: Tensor, sizes: dict[str, int], how_many: int) -> list[Tensor]:
    """Room for every program's share of a sum over tokens, float32 [B, runs, D]."""
    images, tokens, width = h.shape
    shape = images, -(-tokens // sizes["RUN"]), width
    return [torch.empty(shape, dtype=torch.float32, device=h.device) for _ in range(how_many)]


def over_tokens(shares: Tensor, dtype: torch.dtype) -> Tensor:
    """Shares [B, runs, D] of sums over an image's tokens -> the gradient [B, 1, D]."""
    return shares.sum(1, keepdim=True).to(dtype)


def over_all(shares: Tensor, dtype: torch.dtype) -> Tensor:
    """Shares [B, runs, D] of sums over all tokens of all images -> the gradient [D]."""
    return shares.sum((0, 1)).to(dtype)
