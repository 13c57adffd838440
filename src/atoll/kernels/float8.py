"""Linear maps whose products are of 8-bit numbers: twice bfloat16's rate on cards that have them.

float8 is e4m3: a sign, four bits of exponent, three of mantissa, up to 448. A product of two matrices gets a scale for
every row that is summed over, s = max |row| / 448, so that no row's numbers are lost beside another's:

    x w^T ~ s_x s_w^T * (x / s_x)_8 (w / s_w)_8^T

The forward product and the input's gradient, dx = dy w, are made so; the weights' gradient, dw = dy^T x, which sums
over all tokens and is what training lives by, stays in bfloat16. Weights are float32 in memory as ever, and nothing
is remembered from one step to the next.

Only maps whose products are long enough to pay for the rounding: queries, keys and values together, and the MLP's two.
"""

# Triton reads the annotations of kernels; they can say nothing of pointers
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
from torch import Tensor

from .launch import kernel, operator, power_of_two, tl, wrap_triton

FLOAT8 = torch.float8_e4m3fn
NUMBERS_PER_WARP = 512  # of a row, in a program
STEP = 16  # numbers: rows of 8-bit matrices are whole multiples of it


def rounds_well(*widths: int) -> bool:
    """Whether matrices of these widths can be multiplied in float8."""
    return all(width % STEP == 0 for width in widths)


@kernel
def float8_rows_kernel(x_ptr, codes_ptr, scale_ptr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, HAS_GELU: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    there = columns < WIDTH
    x = tl.load(x_ptr + row * WIDTH + columns, mask=there, other=0.0).to(tl.float32)
    if HAS_GELU:
        u = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        x = x / (1.0 + tl.exp(-2.0 * u))
    largest = tl.max(tl.abs(x), axis=0)
    scale = tl.where(largest > 0.0, largest / 448.0, 1.0)
    # a number that is not finite makes its row's scale so too, and with it the answer: a maximum alone would hide it
    tl.store(scale_ptr + row, scale + tl.sum(0.0 * x, axis=0))
    tl.store(codes_ptr + row * WIDTH + columns, (x / scale).to(codes_ptr.dtype.element_ty), mask=there)


@operator("float8_rows")
def _float8_rows(x: Tensor, gelu: bool) -> tuple[Tensor, Tensor]:
    rows, width = x.shape
    block = power_of_two(width)
    codes = torch.empty(x.shape, dtype=FLOAT8, device=x.device)
    scale = torch.empty(rows, 1, dtype=torch.float32, device=x.device)
    wrap_triton(float8_rows_kernel)[(rows,)](
        x_ptr=x,
        codes_ptr=codes,
        scale_ptr=scale,
        WIDTH=width,
        BLOCK=block,
        HAS_GELU=gelu,
        num_warps=max(1, min(16, block // NUMBERS_PER_WARP)),
    )
    return codes, scale


def float8_rows(x: Tensor, *, gelu: bool = False) -> tuple[Tensor, Tensor]:
    """[R, W] -> codes float8 [R, W] and a scale for every row, float32 [R, 1]; of GELU(x), by its tanh form, if so."""
    codes, scale = _float8_rows(x.contiguous(), gelu)
    return codes, scale


def product(
    x: tuple[Tensor, Tensor], weight: tuple[Tensor, Tensor], dtype: torch.dtype, bias: Tensor | None = None
) -> Tensor:
    """x weight^T + bias of rounded matrices [M, K] and [N, K]: [M, N].

    With a bias it is a forward product, which may sum its shorter stretches in fewer bits; gradients may not.
    """
    (codes, scale), (weight_codes, weight_scale) = x, weight
    answer: Tensor = torch._scaled_mm(
        codes,
        weight_codes.t(),
        scale,
        weight_scale.t(),
        bias=None if bias is None else bias.to(torch.bfloat16),
        out_dtype=torch.bfloat16,  # rows with scales of their own give nothing else
        use_fast_accum=bias is not None and codes.is_cuda,
    )
    return answer.to(dtype)


def mapped(x: Tensor, weight: Tensor, bias: Tensor, *, gelu: bool = False) -> Tensor:
    """x weight^T + bias in x's type, [R, K] -> [R, N]; of GELU(x) instead of x if so."""
    return product(float8_rows(x, gelu=gelu), float8_rows(weight), x.dtype, bias)


def pulled(dy: Tensor, weight: Tensor) -> Tensor:
    """dy weight, the gradient of a map's input, in dy's type: [R, N] -> [R, K]; it sums over what the map gives."""
    return product(float8_rows(dy), float8_rows(weight.to(dy.dtype).t()), dy.dtype)
