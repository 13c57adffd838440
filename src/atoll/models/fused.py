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

Attention of short sequences, self_attention and cross_attention, where the linear maps leave and want their numbers:
no head is moved, nothing is stacked. For one head of width d, tokens i, keys j, c = d^-1/2:

    s = c q k^T,   p_ij = exp(s_ij - z_i),   z_i = log sum_j exp s_ij,   o = p v

    dv = p^T do,   dp = do v^T,   ds = p (dp - delta),   delta_i = sum_j p_ij dp_ij = do_i . o_i
    dq = c ds k,   dk = c ds^T q

z is kept (in powers of two), p is made again. A backward program owns one head of one image: it holds a block of keys
with their dk and dv, and passes all queries by them. When the keys need more than one block, dq is added up in place.
Tensor cores want widths of 16 x 2^n: a head is cut in a LOW and a HIGH part, 72 = 64 + 8 of 16, not 72 of 128.

In the other kernels a forward program takes a few tokens of one image. A backward program takes a longer run of them
and adds up its share of the sums over n in registers, each of its rows for itself until the end (no thread waits for
another in the loop, but for a token's own means): [B, runs, D] float32, added by torch afterwards. m and r are
kept, 8 bytes a token; x is made again from h. No kernel has atomics: equal inputs, equal bits.
"""

# Triton reads the annotations of kernels; they can say nothing of pointers
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

try:  # torch brings Triton in its CUDA builds only
    import triton
    import triton.language as tl
except ImportError:
    triton = tl = None

LONGEST_ATTENTION = 256  # tokens or keys; beyond it the blocks of keys are too many for dq to be added up in place
HALF_TYPES = (torch.bfloat16, torch.float16)


class Switch:
    """Whether the fused operators are used. Off until somebody has asked them on this card (training/trust.py): what
    is right on one card need not be on another, or with another Triton."""

    on = False
    epilogue = True  # with them, GELU at the end of the matrix product before it, where nobody asks for a gradient


def available(h: Tensor) -> bool:
    """Whether the fused operators take this tensor: on CUDA, of a type whose arithmetic float32 holds."""
    return Switch.on and triton is not None and h.is_cuda and h.dtype in (*HALF_TYPES, torch.float32)


def attends(h: Tensor, tokens: int, keys: int, head: int) -> bool:
    """Whether the attention kernels take these sizes; float32 is left to torch, which keeps all its digits."""
    return available(h) and h.dtype in HALF_TYPES and fits(tokens, keys, head)


def attends_to_text(h: Tensor, tokens: int, keys: int, head: int) -> bool:
    """The same for text with a mask: keys that one block holds. Cross-attention over several blocks went wrong on an
    H200, and so, once, did cross-attention without a mask (docs/log.md): both are torch's."""
    return keys <= ATTENTION_TILES["cross_backward"].columns and attends(h, tokens, keys, head)


def ends_in_gelu(x: Tensor) -> bool:
    """Whether linear_gelu takes this tensor: the product's own epilogue knows no gradient, and rounds once."""
    return Switch.epilogue and available(x) and x.dtype in HALF_TYPES and not torch.is_grad_enabled()


def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """GELU(x weight^T + bias), by its tanh formula, [..., K] -> [..., N]: one kernel of cuBLAS."""
    rows = torch._addmm_activation(bias, x.flatten(0, -2), weight.t(), use_gelu=True)
    answer: Tensor = rows.unflatten(0, x.shape[:-1])
    return answer


def fits(tokens: int, keys: int, head: int) -> bool:
    """Whether the attention kernels were made, and tested, for these sizes."""
    return min(tokens, keys) >= 1 and max(tokens, keys) <= LONGEST_ATTENTION and 16 <= head <= 128 and head % 8 == 0


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
    wrapped = torch.library.wrap_triton(compiled) if traceable else compiled
    return OnItsDevice(compiled) if wrapped is compiled else wrapped


@dataclass(frozen=True)
class OnItsDevice:
    """A kernel that runs where its tensors are. Triton launches on the current device, which may be another."""

    compiled: Any

    def __getitem__(self, programs: tuple[int]) -> Callable[..., None]:
        def launch(**arguments: Any) -> None:
            device = next(value.device for value in arguments.values() if isinstance(value, Tensor))
            with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
                self.compiled[programs](**arguments)

        return launch


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


@dataclass(frozen=True)
class AttentionTile:
    """Queries and keys that a program of the attention kernels holds at once, its warps, and loads ahead of use."""

    rows: int
    columns: int
    warps: int
    stages: int

    def of(self, tokens: int, keys: int, heads: int, head: int) -> dict[str, Any]:
        """The kernel's sizes for heads of width `head`."""
        low = max(16, power_of_two(head + 1) // 2)
        return {
            "TOKENS": tokens,
            "KEYS": keys,
            "HEADS": heads,
            "HEAD": head,
            "LOW": low,
            "HIGH": max(16, power_of_two(head - low)) if head > low else 0,
            "ROWS": max(16, min(self.rows, power_of_two(tokens))),
            "COLUMNS": max(16, min(self.columns, power_of_two(keys))),
            "num_warps": self.warps,
            "num_stages": self.stages,
        }


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << (n - 1).bit_length()


TILES = {
    "norm": Tile(numbers=4096, warps=4),
    "norm_backward": Tile(numbers=512, warps=1, run=32),  # sums along a token: the fewer warps share it, the better
    "add": Tile(numbers=4096, warps=4),
    "add_backward": Tile(numbers=4096, warps=4, run=32),
}
ATTENTION_TILES = {
    "self": AttentionTile(rows=64, columns=64, warps=4, stages=2),
    "cross": AttentionTile(rows=64, columns=128, warps=4, stages=1),
    "self_backward": AttentionTile(rows=64, columns=128, warps=8, stages=3),
    "cross_backward": AttentionTile(rows=64, columns=128, warps=8, stages=2),
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
    dshift = tl.zeros([ROWS, BLOCK], tl.float32)
    dscale = tl.zeros([ROWS, BLOCK], tl.float32)
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
    dgate = tl.zeros([ROWS, BLOCK], tl.float32)
    for row in range(0, RUN, ROWS):
        rows = first + row + tl.arange(0, ROWS)
        inside = (rows < TOKENS)[:, None] & there[None, :]
        places = rows[:, None] * WIDTH + columns[None, :]
        dsum = tl.load(dsum_ptr + start + places, mask=inside, other=0.0).to(tl.float32)
        branch = tl.load(branch_ptr + start + places, mask=inside, other=0.0).to(tl.float32)
        dgate += dsum * branch
        tl.store(dbranch_ptr + start + places, (dsum * gate[None, :]).to(dbranch_ptr.dtype.element_ty), mask=inside)
    share = tl.program_id(0) * WIDTH + columns
    tl.store(dgate_ptr + share, tl.sum(dgate, axis=0), mask=there)


@kernel
def load_part(
    start_ptr,
    rows,
    LIMIT: tl.constexpr,
    STRIDE: tl.constexpr,
    FIRST: tl.constexpr,
    SIZE: tl.constexpr,
    HEAD: tl.constexpr,
):
    """Columns FIRST .. FIRST + SIZE of one head, of the given rows; 0 beyond the sequence and the head."""
    columns = FIRST + tl.arange(0, SIZE)
    inside = (rows < LIMIT)[:, None] & (columns < HEAD)[None, :]
    return tl.load(start_ptr + rows[:, None] * STRIDE + columns[None, :], mask=inside, other=0.0)


@kernel
def store_part(
    start_ptr,
    numbers,
    rows,
    LIMIT: tl.constexpr,
    STRIDE: tl.constexpr,
    FIRST: tl.constexpr,
    SIZE: tl.constexpr,
    HEAD: tl.constexpr,
):
    columns = FIRST + tl.arange(0, SIZE)
    inside = (rows < LIMIT)[:, None] & (columns < HEAD)[None, :]
    numbers = numbers.to(start_ptr.dtype.element_ty)
    tl.store(start_ptr + rows[:, None] * STRIDE + columns[None, :], numbers, mask=inside)


@kernel
def allowed_keys(mask_ptr, image, keys, KEYS: tl.constexpr, HAS_MASK: tl.constexpr):
    allowed = keys < KEYS
    if HAS_MASK:
        allowed = allowed & (tl.load(mask_ptr + image * KEYS + keys, mask=allowed, other=0) != 0)
    return allowed


@kernel
def attend(
    q_ptr,
    k_ptr,
    v_ptr,
    mask_ptr,
    o_ptr,
    z_ptr,
    Q_STRIDE: tl.constexpr,
    KV_STRIDE: tl.constexpr,
    HAS_MASK: tl.constexpr,
    TOKENS: tl.constexpr,
    KEYS: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Some queries of one head of one image; the strides are those of a token, in numbers."""
    blocks: tl.constexpr = (TOKENS + ROWS - 1) // ROWS
    rows = (tl.program_id(0) % blocks) * ROWS + tl.arange(0, ROWS)
    head = (tl.program_id(0) // blocks) % HEADS
    image = tl.program_id(0) // (blocks * HEADS)
    q_ptr += image.to(tl.int64) * (TOKENS * Q_STRIDE) + head * HEAD
    k_ptr += image.to(tl.int64) * (KEYS * KV_STRIDE) + head * HEAD
    v_ptr += image.to(tl.int64) * (KEYS * KV_STRIDE) + head * HEAD
    o_ptr += image.to(tl.int64) * (TOKENS * HEADS * HEAD) + head * HEAD
    # exp(c x) = 2^(c log2(e) x): the hardware knows powers of two
    power: tl.constexpr = HEAD**-0.5 * 1.4426950408889634

    q_low = load_part(q_ptr, rows, TOKENS, Q_STRIDE, 0, LOW, HEAD)
    o_low = tl.zeros([ROWS, LOW], tl.float32)
    if HIGH > 0:
        q_high = load_part(q_ptr, rows, TOKENS, Q_STRIDE, LOW, HIGH, HEAD)
        o_high = tl.zeros([ROWS, HIGH], tl.float32)
    highest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)

    for first in range(0, KEYS, COLUMNS):
        keys = first + tl.arange(0, COLUMNS)
        s = tl.dot(q_low, tl.trans(load_part(k_ptr, keys, KEYS, KV_STRIDE, 0, LOW, HEAD)), input_precision="ieee")
        if HIGH > 0:
            k_high = load_part(k_ptr, keys, KEYS, KV_STRIDE, LOW, HIGH, HEAD)
            s = tl.dot(q_high, tl.trans(k_high), s, input_precision="ieee")
        s *= power
        if HAS_MASK or KEYS % COLUMNS != 0:
            # finite: a block without one allowed key must not make a NaN; the first allowed key outweighs it
            s = tl.where(allowed_keys(mask_ptr, image, keys, KEYS, HAS_MASK)[None, :], s, -1.0e30)

        higher = tl.maximum(highest, tl.max(s, axis=1))
        p = tl.exp2(s - higher[:, None])
        fade = tl.exp2(highest - higher)
        highest = higher
        total = total * fade + tl.sum(p, axis=1)
        p = p.to(v_ptr.dtype.element_ty)
        v_low = load_part(v_ptr, keys, KEYS, KV_STRIDE, 0, LOW, HEAD)
        o_low = tl.dot(p, v_low, o_low * fade[:, None], input_precision="ieee")
        if HIGH > 0:
            v_high = load_part(v_ptr, keys, KEYS, KV_STRIDE, LOW, HIGH, HEAD)
            o_high = tl.dot(p, v_high, o_high * fade[:, None], input_precision="ieee")

    store_part(o_ptr, o_low / total[:, None], rows, TOKENS, HEADS * HEAD, 0, LOW, HEAD)
    if HIGH > 0:
        store_part(o_ptr, o_high / total[:, None], rows, TOKENS, HEADS * HEAD, LOW, HIGH, HEAD)
    tl.store(z_ptr + (image * HEADS + head) * TOKENS + rows, highest + tl.log2(total), mask=rows < TOKENS)


@kernel
def attend_backward(
    q_ptr,
    k_ptr,
    v_ptr,
    mask_ptr,
    o_ptr,
    z_ptr,
    do_ptr,
    dq_ptr,
    dk_ptr,
    dv_ptr,
    Q_STRIDE: tl.constexpr,
    KV_STRIDE: tl.constexpr,
    HAS_MASK: tl.constexpr,
    TOKENS: tl.constexpr,
    KEYS: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """One head of one image. Scores stand with a row for each key and a column for each query."""
    head = tl.program_id(0) % HEADS
    image = tl.program_id(0) // HEADS
    q_start = image.to(tl.int64) * (TOKENS * Q_STRIDE) + head * HEAD
    k_start = image.to(tl.int64) * (KEYS * KV_STRIDE) + head * HEAD
    o_start = image.to(tl.int64) * (TOKENS * HEADS * HEAD) + head * HEAD
    q_ptr += q_start
    dq_ptr += q_start
    k_ptr += k_start
    dk_ptr += k_start
    v_ptr += k_start
    dv_ptr += k_start
    o_ptr += o_start
    do_ptr += o_start
    z_ptr += (image * HEADS + head) * TOKENS
    factor: tl.constexpr = HEAD**-0.5
    power: tl.constexpr = HEAD**-0.5 * 1.4426950408889634
    number = k_ptr.dtype.element_ty

    for first_key in range(0, KEYS, COLUMNS):
        keys = first_key + tl.arange(0, COLUMNS)
        allowed = allowed_keys(mask_ptr, image, keys, KEYS, HAS_MASK)
        k_low = load_part(k_ptr, keys, KEYS, KV_STRIDE, 0, LOW, HEAD)
        v_low = load_part(v_ptr, keys, KEYS, KV_STRIDE, 0, LOW, HEAD)
        dk_low = tl.zeros([COLUMNS, LOW], tl.float32)
        dv_low = tl.zeros([COLUMNS, LOW], tl.float32)
        if HIGH > 0:
            k_high = load_part(k_ptr, keys, KEYS, KV_STRIDE, LOW, HIGH, HEAD)
            v_high = load_part(v_ptr, keys, KEYS, KV_STRIDE, LOW, HIGH, HEAD)
            dk_high = tl.zeros([COLUMNS, HIGH], tl.float32)
            dv_high = tl.zeros([COLUMNS, HIGH], tl.float32)

        for first in range(0, TOKENS, ROWS):
            rows = first + tl.arange(0, ROWS)
            # a row beyond the sequence has q = do = 0, so it adds nothing to dk and dv whatever its p
            q_low = load_part(q_ptr, rows, TOKENS, Q_STRIDE, 0, LOW, HEAD)
            do_low = load_part(do_ptr, rows, TOKENS, HEADS * HEAD, 0, LOW, HEAD)
            s = tl.dot(k_low, tl.trans(q_low), input_precision="ieee")
            dp = tl.dot(v_low, tl.trans(do_low), input_precision="ieee")
            if HIGH > 0:
                q_high = load_part(q_ptr, rows, TOKENS, Q_STRIDE, LOW, HIGH, HEAD)
                do_high = load_part(do_ptr, rows, TOKENS, HEADS * HEAD, LOW, HIGH, HEAD)
                s = tl.dot(k_high, tl.trans(q_high), s, input_precision="ieee")
                dp = tl.dot(v_high, tl.trans(do_high), dp, input_precision="ieee")
            z = tl.load(z_ptr + rows, mask=rows < TOKENS, other=0.0)
            p = tl.exp2(s * power - z[None, :])
            if HAS_MASK or KEYS % COLUMNS != 0:
                p = tl.where(allowed[:, None], p, 0.0)

            if KEYS <= COLUMNS:
                delta = tl.sum(p * dp, axis=0)
            else:
                o_low = load_part(o_ptr, rows, TOKENS, HEADS * HEAD, 0, LOW, HEAD)
                delta = tl.sum(o_low.to(tl.float32) * do_low.to(tl.float32), axis=1)
                if HIGH > 0:
                    o_high = load_part(o_ptr, rows, TOKENS, HEADS * HEAD, LOW, HIGH, HEAD)
                    delta += tl.sum(o_high.to(tl.float32) * do_high.to(tl.float32), axis=1)
            ds = (p * (dp - delta[None, :])).to(number)
            p = p.to(number)

            dv_low = tl.dot(p, do_low, dv_low, input_precision="ieee")
            dk_low = tl.dot(ds, q_low, dk_low, input_precision="ieee")
            dq_low = factor * tl.dot(tl.trans(ds), k_low, input_precision="ieee")
            if KEYS > COLUMNS:
                before = tl.where(first_key > 0, rows, TOKENS)  # the first block of keys finds nothing to add to
                dq_low += load_part(dq_ptr, before, TOKENS, Q_STRIDE, 0, LOW, HEAD).to(tl.float32)
            store_part(dq_ptr, dq_low, rows, TOKENS, Q_STRIDE, 0, LOW, HEAD)
            if HIGH > 0:
                dv_high = tl.dot(p, do_high, dv_high, input_precision="ieee")
                dk_high = tl.dot(ds, q_high, dk_high, input_precision="ieee")
                dq_high = factor * tl.dot(tl.trans(ds), k_high, input_precision="ieee")
                if KEYS > COLUMNS:
                    dq_high += load_part(dq_ptr, before, TOKENS, Q_STRIDE, LOW, HIGH, HEAD).to(tl.float32)
                store_part(dq_ptr, dq_high, rows, TOKENS, Q_STRIDE, LOW, HIGH, HEAD)

        store_part(dk_ptr, factor * dk_low, keys, KEYS, KV_STRIDE, 0, LOW, HEAD)
        store_part(dv_ptr, dv_low, keys, KEYS, KV_STRIDE, 0, LOW, HEAD)
        if HIGH > 0:
            store_part(dk_ptr, factor * dk_high, keys, KEYS, KV_STRIDE, LOW, HIGH, HEAD)
            store_part(dv_ptr, dv_high, keys, KEYS, KV_STRIDE, LOW, HIGH, HEAD)
        if KEYS > COLUMNS:
            tl.debug_barrier()  # other threads of this program read back the dq stored here


# torch must see which tensors a kernel writes, each once: the packed layouts are taken apart in here.


@kernel
def self_attention_kernel(
    qkv_ptr,
    o_ptr,
    z_ptr,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    width: tl.constexpr = HEADS * HEAD
    attend(
        qkv_ptr,
        qkv_ptr + width,
        qkv_ptr + 2 * width,
        qkv_ptr,
        o_ptr,
        z_ptr,
        3 * width,
        3 * width,
        False,
        TOKENS,
        TOKENS,
        HEADS,
        HEAD,
        LOW,
        HIGH,
        ROWS,
        COLUMNS,
    )


@kernel
def self_attention_backward_kernel(
    qkv_ptr,
    o_ptr,
    z_ptr,
    do_ptr,
    dqkv_ptr,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    width: tl.constexpr = HEADS * HEAD
    attend_backward(
        qkv_ptr,
        qkv_ptr + width,
        qkv_ptr + 2 * width,
        qkv_ptr,
        o_ptr,
        z_ptr,
        do_ptr,
        dqkv_ptr,
        dqkv_ptr + width,
        dqkv_ptr + 2 * width,
        3 * width,
        3 * width,
        False,
        TOKENS,
        TOKENS,
        HEADS,
        HEAD,
        LOW,
        HIGH,
        ROWS,
        COLUMNS,
    )


@kernel
def cross_attention_kernel(
    q_ptr,
    kv_ptr,
    mask_ptr,
    o_ptr,
    z_ptr,
    HAS_MASK: tl.constexpr,
    TOKENS: tl.constexpr,
    KEYS: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    width: tl.constexpr = HEADS * HEAD
    attend(
        q_ptr,
        kv_ptr,
        kv_ptr + width,
        mask_ptr,
        o_ptr,
        z_ptr,
        width,
        2 * width,
        HAS_MASK,
        TOKENS,
        KEYS,
        HEADS,
        HEAD,
        LOW,
        HIGH,
        ROWS,
        COLUMNS,
    )


@kernel
def cross_attention_backward_kernel(
    q_ptr,
    kv_ptr,
    mask_ptr,
    o_ptr,
    z_ptr,
    do_ptr,
    dq_ptr,
    dkv_ptr,
    HAS_MASK: tl.constexpr,
    TOKENS: tl.constexpr,
    KEYS: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    width: tl.constexpr = HEADS * HEAD
    attend_backward(
        q_ptr,
        kv_ptr,
        kv_ptr + width,
        mask_ptr,
        o_ptr,
        z_ptr,
        do_ptr,
        dq_ptr,
        dkv_ptr,
        dkv_ptr + width,
        width,
        2 * width,
        HAS_MASK,
        TOKENS,
        KEYS,
        HEADS,
        HEAD,
        LOW,
        HIGH,
        ROWS,
        COLUMNS,
    )


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
    return dh, over_tokens(dshift, ctx.types[0]), over_tokens(dscale, ctx.types[1]), None


differentiate(_norm_modulate, _norm_modulate_gradient, _norm_modulate_context)


# ---------------------------------------------------------------------------------------------------------------
# add_norm_modulate


def add_norm_modulate(
    h: Tensor, branch: Tensor, gate: Tensor | None, shift: Tensor, scale: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """h' = h + gate branch (None: h + branch) and y = LayerNorm(h') (1 + scale) + shift, both in h's type."""
    assert branch.shape == h.shape, f"branch {list(branch.shape)}, tokens {list(h.shape)}"
    gate = None if gate is None else per_image(gate, h)
    shift, scale = per_image(shift, h), per_image(scale, h)
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
    ctx.save_for_backward(total, *((branch, gate) if ctx.gated else ()), scale, mean, rstd)
    ctx.types = [None if x is None else x.dtype for x in (branch, gate, shift, scale)]


def _add_norm_modulate_gradient(
    ctx: Any, dsum: Tensor, dy: Tensor, _dmean: Any, _drstd: Any
) -> tuple[Tensor | None, ...]:
    dsum, dy = dsum.contiguous(), dy.contiguous()
    branch_type, gate_type, shift_type, scale_type = ctx.types
    if ctx.gated:
        dh, dbranch, gates, shifts, scales = _add_gated_norm_modulate_backward(dsum, dy, *ctx.saved_tensors)
    else:
        dh, shifts, scales = _add_norm_modulate_backward(dsum, dy, *ctx.saved_tensors)
        dbranch, gates = dh.to(branch_type), None
    dgate = None if gates is None else over_tokens(gates, gate_type)
    return dh, dbranch, dgate, over_tokens(shifts, shift_type), over_tokens(scales, scale_type), None


differentiate(_add_norm_modulate, _add_norm_modulate_gradient, _add_norm_modulate_context)


# ---------------------------------------------------------------------------------------------------------------
# gated_add


def gated_add(h: Tensor, gate: Tensor, branch: Tensor) -> Tensor:
    """h + gate branch, in h's type."""
    assert branch.shape == h.shape, f"branch {list(branch.shape)}, tokens {list(h.shape)}"
    total: Tensor = _gated_add(h.contiguous(), per_image(gate, h), branch.contiguous())
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


def _gated_add_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[1:])


def _gated_add_gradient(ctx: Any, dsum: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    gate, branch = ctx.saved_tensors
    dsum = dsum.contiguous()
    dbranch, gates = _gated_add_backward(dsum, gate, branch)
    return dsum, over_tokens(gates, gate.dtype), dbranch


differentiate(_gated_add, _gated_add_gradient, _gated_add_context)


# ---------------------------------------------------------------------------------------------------------------
# Attention


def self_attention(qkv: Tensor) -> Tensor:
    """Every token asks every token: queries, keys and values [B, N, 3, H, d] -> [B, N, H d]."""
    _images, tokens, three, _heads, head = qkv.shape
    assert three == 3, f"queries, keys and values are three, got {list(qkv.shape)}"
    assert fits(tokens, tokens, head), f"no kernel for {list(qkv.shape)}: see fits()"
    o: Tensor = _self_attention(qkv.contiguous())[0]
    return o


def cross_attention(q: Tensor, kv: Tensor, mask: Tensor | None) -> Tensor:
    """Queries [B, N, H, d] ask keys and values [B, L, 2, H, d] -> [B, N, H d].

    mask, bool [B, L], is True where a key may be read: at least one in every row.
    """
    images, tokens, heads, head = q.shape
    keys = kv.shape[1]
    assert fits(tokens, keys, head), f"no kernel for {list(q.shape)} and {keys} keys: see fits()"
    assert kv.shape == (images, keys, 2, heads, head), f"queries {list(q.shape)}, keys and values {list(kv.shape)}"
    if mask is not None:
        assert mask.dtype == torch.bool, f"mask of {mask.dtype}"
        assert mask.shape == (images, keys), f"mask {list(mask.shape)}, keys and values {list(kv.shape)}"
        mask = mask.contiguous()
    o: Tensor = _cross_attention(q.contiguous(), kv.contiguous(), mask)[0]
    return o


@operator("self_attention")
def _self_attention(qkv: Tensor) -> tuple[Tensor, Tensor]:
    """o [B, N, H d], and z in powers of two, float32 [B, H, N]."""
    images, tokens, _three, heads, head = qkv.shape
    sizes = ATTENTION_TILES["self"].of(tokens, tokens, heads, head)
    del sizes["KEYS"]
    o = qkv.new_empty(images, tokens, heads * head)
    z = qkv.new_empty(images, heads, tokens, dtype=torch.float32)
    programs = images * heads * -(-tokens // sizes["ROWS"])
    wrap_triton(self_attention_kernel)[(programs,)](qkv_ptr=qkv, o_ptr=o, z_ptr=z, **sizes)
    return o, z


@operator("self_attention_backward")
def _self_attention_backward(do: Tensor, qkv: Tensor, o: Tensor, z: Tensor) -> Tensor:
    images, tokens, _three, heads, head = qkv.shape
    sizes = ATTENTION_TILES["self_backward"].of(tokens, tokens, heads, head)
    del sizes["KEYS"]
    dqkv = torch.empty_like(qkv)
    wrap_triton(self_attention_backward_kernel)[(images * heads,)](
        qkv_ptr=qkv, o_ptr=o, z_ptr=z, do_ptr=do, dqkv_ptr=dqkv, **sizes
    )
    return dqkv


def _self_attention_context(ctx: Any, inputs: tuple[Tensor], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs, *output)


def _self_attention_gradient(ctx: Any, do: Tensor, _dz: Any) -> Tensor:
    dqkv: Tensor = _self_attention_backward(do.contiguous(), *ctx.saved_tensors)
    return dqkv


differentiate(_self_attention, _self_attention_gradient, _self_attention_context)


@operator("cross_attention")
def _cross_attention(q: Tensor, kv: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """o [B, N, H d], and z in powers of two, float32 [B, H, N]."""
    images, tokens, heads, head = q.shape
    sizes = ATTENTION_TILES["cross"].of(tokens, kv.shape[1], heads, head)
    o = q.new_empty(images, tokens, heads * head)
    z = q.new_empty(images, heads, tokens, dtype=torch.float32)
    programs = images * heads * -(-tokens // sizes["ROWS"])
    wrap_triton(cross_attention_kernel)[(programs,)](
        q_ptr=q, kv_ptr=kv, mask_ptr=q if mask is None else mask, o_ptr=o, z_ptr=z, HAS_MASK=mask is not None, **sizes
    )
    return o, z


@operator("cross_attention_backward")
def _cross_attention_backward(
    do: Tensor, q: Tensor, kv: Tensor, mask: Tensor | None, o: Tensor, z: Tensor
) -> tuple[Tensor, Tensor]:
    images, tokens, heads, head = q.shape
    sizes = ATTENTION_TILES["cross_backward"].of(tokens, kv.shape[1], heads, head)
    dq, dkv = torch.empty_like(q), torch.empty_like(kv)
    wrap_triton(cross_attention_backward_kernel)[(images * heads,)](
        q_ptr=q,
        kv_ptr=kv,
        mask_ptr=q if mask is None else mask,
        o_ptr=o,
        z_ptr=z,
        do_ptr=do,
        dq_ptr=dq,
        dkv_ptr=dkv,
        HAS_MASK=mask is not None,
        **sizes,
    )
    return dq, dkv


def _cross_attention_context(
    ctx: Any, inputs: tuple[Tensor, Tensor, Tensor | None], output: tuple[Tensor, Tensor]
) -> None:
    ctx.save_for_backward(*inputs, *output)


def _cross_attention_gradient(ctx: Any, do: Tensor, _dz: Any) -> tuple[Tensor, Tensor, None]:
    dq, dkv = _cross_attention_backward(do.contiguous(), *ctx.saved_tensors)
    return dq, dkv, None


differentiate(_cross_attention, _cross_attention_gradient, _cross_attention_context)


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
