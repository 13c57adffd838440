"""The backbone's memory-bound steps, each as one pass over the tokens (Triton, CUDA only).

dit.py holds the plain formulas. They are the reference, and the path on every device but CUDA: `available` decides.
All arithmetic here is float32, whatever the tensors are. B images, N tokens, D width; h, branch and y [B, N, D];
gate, shift and scale [B, 1, D]; sums over n run over an image's tokens, means over d over a token's D numbers.

Norm and modulation, norm_modulate:

    x = (h - m) r,   m = mean_d h,   r = (mean_d (h - m)^2 + eps)^-1/2
    y = x (1 + scale) + shift

    g = dy (1 + scale)
    dh = r (g - mean_d g - x mean_d(g x)),   dshift = sum_n dy,   dscale = sum_n dy x

Residual before it, add_norm_modulate: h' = h + gate branch (gate None: 1), y of h'. With d' = dh' + (dh of above)

    dh = d',   dbranch = gate d',   dgate = sum_n d' branch

Residual alone, gated_add: h' = h + gate branch, the same with d' = dh'.

A forward program takes a few tokens of one image. A backward program takes a longer run of them and adds up its share
of the sums over n in registers: [B, runs, D] float32, added by torch afterwards. No atomics: equal inputs, equal bits.
m and r are kept, 8 bytes a token; x is made again from h.
"""

# Triton reads the annotations of kernels; they can say nothing of pointers
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

try:  # torch brings Triton in its CUDA builds only
    import triton
    import triton.language as tl
except ImportError:
    triton = tl = None

HALF_TYPES = (torch.bfloat16, torch.float16)


def available(h: Tensor) -> bool:
    """Whether the fused operators take this tensor: on CUDA, of a type whose arithmetic float32 holds."""
    return triton is not None and h.is_cuda and h.dtype in (*HALF_TYPES, torch.float32)


def kernel(function: Callable[..., Any]) -> Any:
    """triton.jit, or the function itself where there is no Triton and nothing will launch it."""
    return function if triton is None else triton.jit(function)


def operator(name: str) -> Callable[[Callable[..., Any]], Any]:
    """Make a function that launches kernels an operator of torch, which torch.compile sees through."""
    if triton is None:
        return lambda function: function
    return torch.library.triton_op(f"atoll::{name}", mutates_args=())


def differentiate(forward: Any, gradient: Callable[..., Any], context: Callable[..., None]) -> None:
    """Give an operator its gradient; `context` keeps what the gradient needs."""
    if triton is not None:
        forward.register_autograd(gradient, setup_context=context)


def wrap_triton(compiled: Any) -> Any:
    """torch's, which makes a launch traceable; the interpreter's kernels (in tests) cannot be traced.

    Keep the name, and call it on a kernel's name: torch reads the operators' source to find the kernels they use.
    """
    traceable = isinstance(compiled, triton.runtime.jit.JITFunction)
    return torch.library.wrap_triton(compiled) if traceable else compiled


@dataclass(frozen=True)
class Tile:
    """How a norm kernel cuts its work. Fixed, not tuned at run time: sums must not depend on what else ran.

    numbers   of one tensor that a program holds at once: tokens x (D rounded up to a power of two)
    warps     of 32 threads in a program
    run       tokens per program, for backward kernels (rounded up to whole tiles)
    """

    numbers: int
    warps: int
    run: int = 0

    def of(self, tokens: int, width: int) -> dict[str, int]:
        """The kernel's sizes for images of `tokens` tokens of `width` numbers."""
        block = power_of_two(width)
        rows = max(1, min(self.numbers // block, power_of_two(tokens), 16))
        sizes = {"WIDTH": width, "BLOCK": block, "ROWS": rows, "num_warps": self.warps}
        if self.run:
            sizes["RUN"] = rows * -(-min(self.run, tokens) // rows)
        return sizes


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << (n - 1).bit_length()


TILES = {
    "norm": Tile(numbers=4096, warps=4),
    "norm_backward": Tile(numbers=2048, warps=8, run=32),
    "add": Tile(numbers=4096, warps=4),
    "add_backward": Tile(numbers=4096, warps=4, run=32),
}


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
        # normalise what the next reader will see: the sum as it is stored
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
    dshift_ptr,
    dscale_ptr,
    TOKENS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_GATE: tl.constexpr,
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
    dshift = tl.zeros([BLOCK], tl.float32)
    dscale = tl.zeros([BLOCK], tl.float32)
    if HAS_GATE:
        gate = tl.load(gate_ptr + image * WIDTH + columns, mask=there, other=0.0).to(tl.float32)
        dgate = tl.zeros([BLOCK], tl.float32)

    for row in range(0, RUN, ROWS):
        rows = first + row + tl.arange(0, ROWS)
        inside = (rows < TOKENS)[:, None] & there[None, :]
        places = rows[:, None] * WIDTH + columns[None, :]
        dy = tl.load(dy_ptr + start + places, mask=inside, other=0.0).to(tl.float32)
        h = tl.load(h_ptr + start + places, mask=inside, other=0.0).to(tl.float32)
        mean = tl.load(mean_ptr + image * TOKENS + rows, mask=rows < TOKENS, other=0.0)
        rstd = tl.load(rstd_ptr + image * TOKENS + rows, mask=rows < TOKENS, other=0.0)

        x = (h - mean[:, None]) * rstd[:, None]  # beyond D it is not 0, but dy and g are
        g = dy * slope[None, :]
        dshift += tl.sum(dy, axis=0)
        dscale += tl.sum(dy * x, axis=0)
        mean_g = tl.sum(g, axis=1) / WIDTH
        mean_gx = tl.sum(g * x, axis=1) / WIDTH
        dh = rstd[:, None] * (g - mean_g[:, None] - x * mean_gx[:, None])
        if HAS_RESIDUAL:
            dh += tl.load(dsum_ptr + start + places, mask=inside, other=0.0).to(tl.float32)
        tl.store(dh_ptr + start + places, dh.to(dh_ptr.dtype.element_ty), mask=inside)
        if HAS_GATE:
            branch = tl.load(branch_ptr + start + places, mask=inside, other=0.0).to(tl.float32)
            dgate += tl.sum(dh * branch, axis=0)
            dbranch = dh * gate[None, :]
            tl.store(dbranch_ptr + start + places, dbranch.to(dbranch_ptr.dtype.element_ty), mask=inside)

    share = tl.program_id(0) * WIDTH + columns
    tl.store(dshift_ptr + share, dshift, mask=there)
    tl.store(dscale_ptr + share, dscale, mask=there)
    if HAS_GATE:
        tl.store(dgate_ptr + share, dgate, mask=there)


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
    TOKENS: tl.constexpr,
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
    dgate = tl.zeros([BLOCK], tl.float32)
    for row in range(0, RUN, ROWS):
        rows = first + row + tl.arange(0, ROWS)
        inside = (rows < TOKENS)[:, None] & there[None, :]
        places = rows[:, None] * WIDTH + columns[None, :]
        dsum = tl.load(dsum_ptr + start + places, mask=inside, other=0.0).to(tl.float32)
        branch = tl.load(branch_ptr + start + places, mask=inside, other=0.0).to(tl.float32)
        dgate += tl.sum(dsum * branch, axis=0)
        tl.store(dbranch_ptr + start + places, (dsum * gate[None, :]).to(dbranch_ptr.dtype.element_ty), mask=inside)
    tl.store(dgate_ptr + tl.program_id(0) * WIDTH + columns, dgate, mask=there)


# ---------------------------------------------------------------------------------------------------------------
# norm_modulate


def norm_modulate(h: Tensor, shift: Tensor, scale: Tensor, eps: float) -> Tensor:
    """LayerNorm(h) (1 + scale) + shift, in h's type."""
    y: Tensor = _norm_modulate(h.contiguous(), shift, scale, eps)[0]
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
        dshift_ptr=dshift,
        dscale_ptr=dscale,
        TOKENS=tokens,
        HAS_RESIDUAL=False,
        HAS_GATE=False,
        **sizes,
    )
    return dh, dshift, dscale


def _norm_modulate_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    h, shift, scale, _eps = inputs
    ctx.save_for_backward(h, scale, *output[1:])
    ctx.types = shift.dtype, scale.dtype


def _norm_modulate_gradient(ctx: Any, dy: Tensor, _dmean: Any, _drstd: Any) -> tuple[Tensor | None, ...]:
    dh, dshift, dscale = _norm_modulate_backward(dy.contiguous(), *ctx.saved_tensors)
    return dh, *added((dshift, dscale), ctx.types), None


differentiate(_norm_modulate, _norm_modulate_gradient, _norm_modulate_context)


# ---------------------------------------------------------------------------------------------------------------
# add_norm_modulate


def add_norm_modulate(
    h: Tensor, branch: Tensor, gate: Tensor | None, shift: Tensor, scale: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """h' = h + gate branch (None: h + branch) and y = LayerNorm(h') (1 + scale) + shift, both in h's type."""
    total, y, _mean, _rstd = _add_norm_modulate(h.contiguous(), branch.contiguous(), gate, shift, scale, eps)
    return total, y


@operator("add_norm_modulate")
def _add_norm_modulate(
    h: Tensor, branch: Tensor, gate: Tensor | None, shift: Tensor, scale: Tensor, eps: float
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
    dsum: Tensor, dy: Tensor, total: Tensor, scale: Tensor, mean: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Without a gate: d' (that is dh and dbranch both), and the shares of dshift and dscale."""
    images, tokens, width = total.shape
    sizes = TILES["norm_backward"].of(tokens, width)
    dh, dshift, dscale = torch.empty_like(total), *run_shares(total, sizes, 2)
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
        dshift_ptr=dshift,
        dscale_ptr=dscale,
        TOKENS=tokens,
        HAS_RESIDUAL=True,
        HAS_GATE=False,
        **sizes,
    )
    return dh, dshift, dscale


@operator("add_gated_norm_modulate_backward")
def _add_gated_norm_modulate_backward(
    dsum: Tensor,
    dy: Tensor,
    total: Tensor,
    branch: Tensor,
    gate: Tensor,
    scale: Tensor,
    mean: Tensor,
    rstd: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """With a gate: dh, dbranch, and the shares of dgate, dshift and dscale."""
    images, tokens, width = total.shape
    sizes = TILES["norm_backward"].of(tokens, width)
    dh, dbranch = torch.empty_like(total), torch.empty_like(branch)
    dgate, dshift, dscale = run_shares(total, sizes, 3)
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
        dshift_ptr=dshift,
        dscale_ptr=dscale,
        TOKENS=tokens,
        HAS_RESIDUAL=True,
        HAS_GATE=True,
        **sizes,
    )
    return dh, dbranch, dgate, dshift, dscale


def _add_norm_modulate_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _h, branch, gate, shift, scale, _eps = inputs
    total, _y, mean, rstd = output
    ctx.gated = gate is not None
    ctx.types = shift.dtype, scale.dtype
    if ctx.gated:
        ctx.save_for_backward(total, branch, gate, scale, mean, rstd)
        ctx.types = gate.dtype, *ctx.types
    else:
        ctx.save_for_backward(total, scale, mean, rstd)
        ctx.branch_type = branch.dtype


def _add_norm_modulate_gradient(
    ctx: Any, dsum: Tensor, dy: Tensor, _dmean: Any, _drstd: Any
) -> tuple[Tensor | None, ...]:
    dsum, dy = dsum.contiguous(), dy.contiguous()
    if ctx.gated:
        dh, dbranch, *shares = _add_gated_norm_modulate_backward(dsum, dy, *ctx.saved_tensors)
        return dh, dbranch, *added(shares, ctx.types), None
    dh, *shares = _add_norm_modulate_backward(dsum, dy, *ctx.saved_tensors)
    return dh, dh.to(ctx.branch_type), None, *added(shares, ctx.types), None


differentiate(_add_norm_modulate, _add_norm_modulate_gradient, _add_norm_modulate_context)


# ---------------------------------------------------------------------------------------------------------------
# gated_add


def gated_add(h: Tensor, gate: Tensor, branch: Tensor) -> Tensor:
    """h + gate branch, in h's type."""
    total: Tensor = _gated_add(h.contiguous(), gate, branch.contiguous())
    return total


@operator("gated_add")
def _gated_add(h: Tensor, gate: Tensor, branch: Tensor) -> Tensor:
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
def _gated_add_backward(dsum: Tensor, gate: Tensor, branch: Tensor) -> tuple[Tensor, Tensor]:
    """dbranch, and the shares of dgate, float32 [B, runs, D]."""
    images, tokens, width = branch.shape
    sizes = TILES["add_backward"].of(tokens, width)
    dbranch, (dgate,) = torch.empty_like(branch), run_shares(branch, sizes, 1)
    wrap_triton(add_backward_kernel)[(images * dgate.shape[1],)](
        dsum_ptr=dsum,
        branch_ptr=branch,
        gate_ptr=gate.contiguous(),
        dbranch_ptr=dbranch,
        dgate_ptr=dgate,
        TOKENS=tokens,
        **sizes,
    )
    return dbranch, dgate


def _gated_add_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    _h, gate, branch = inputs
    ctx.save_for_backward(gate, branch)


def _gated_add_gradient(ctx: Any, dsum: Tensor) -> tuple[Tensor, ...]:
    gate, branch = ctx.saved_tensors
    dsum = dsum.contiguous()
    dbranch, dgate = _gated_add_backward(dsum, gate, branch)
    return dsum, *added((dgate,), (gate.dtype,)), dbranch


differentiate(_gated_add, _gated_add_gradient, _gated_add_context)


# ---------------------------------------------------------------------------------------------------------------


def token_numbers(h: Tensor, how_many: int) -> list[Tensor]:
    """Room for one float32 per token, [B, N]."""
    return [torch.empty(h.shape[:2], dtype=torch.float32, device=h.device) for _ in range(how_many)]


def run_shares(h: Tensor, sizes: dict[str, int], how_many: int) -> list[Tensor]:
    """Room for every program's share of a sum over tokens, float32 [B, runs, D]."""
    images, tokens, width = h.shape
    shape = images, -(-tokens // sizes["RUN"]), width
    return [torch.empty(shape, dtype=torch.float32, device=h.device) for _ in range(how_many)]


def added(shares: list[Tensor] | tuple[Tensor, ...], types: tuple[torch.dtype, ...]) -> list[Tensor]:
    """Shares of sums over tokens, [B, runs, D] each, to gradients [B, 1, D] of the given types."""
    return [share.sum(1, keepdim=True).to(dtype) for share, dtype in zip(shares, types, strict=True)]
