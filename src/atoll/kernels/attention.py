"""Attention of short sequences in the layout of the linear maps: no head is moved, nothing stacked.

For one head of width d, tokens i, keys j, c = d^-1/2:

    s = c q k^T,   p_ij = exp(s_ij - z_i),   z_i = log sum_j exp s_ij,   o = p v

    dv = p^T do,   dp = do v^T,   ds = p (dp - delta),   delta_i = sum_j p_ij dp_ij = do_i . o_i
    dq = c ds k,   dk = c ds^T q

z is kept (in powers of two), p is computed again, twice: the backward pass is two kernels, one for dq (and delta) whose
programs hold some queries and go through the keys, and one for dk and dv, the other way round. One kernel for all three
saves two products of seven, but uses so many registers that a multiprocessor runs one program, which mostly waits.
Tensor cores want widths of 16 x 2^n: a head is cut in a low and a high part, 72 = 64 + 8 of 16, not 72 of 128.
Arithmetic is float32 whatever the tensors are; there are no atomics, so equal inputs give equal bits.

Measured on an H200 (51b7cae, benchmarks/results/train-step-h200.csv): one XL/2 block, batch 128, compiled, forward and
backward takes 8.12 ms with these kernels, 8.55 ms with torch's attention (5 %). They also summed the gradients of
biases then, which torch does now.

**ptxas 12.8 makes wrong code of some tiles**: in a product with the high part of keys it adds to a register it never
set, and tensor cores read beyond shared memory (seen in the machine code and by compute-sanitizer; cross-attention with
128 keys a block on an H200). TILES holds none of them (tests/models/test_machine_code.py), and
models/kernel_check.py compares the kernels with the plain formulas on every new GPU.
"""

# Triton reads the annotations of kernels; they can say nothing of pointers
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .launch import available, kernel, operator, power_of_two, tl, triton, wrap_triton

LONGEST = 256  # tokens or keys: what these kernels were measured and tested for


@dataclass(frozen=True)
class Tile:
    """Queries and keys that a program holds at once, its warps, and loads ahead of use."""

    rows: int
    columns: int
    warps: int
    stages: int


TILES = {
    "self": Tile(rows=64, columns=64, warps=4, stages=2),
    "self_dq": Tile(rows=64, columns=32, warps=4, stages=3),
    "self_dkv": Tile(rows=32, columns=64, warps=4, stages=3),
    "cross": Tile(rows=64, columns=16, warps=4, stages=3),
    "cross_dq": Tile(rows=64, columns=32, warps=4, stages=2),
    "cross_dkv": Tile(rows=32, columns=64, warps=4, stages=3),
}


# ---------------------------------------------------------------------------------------------------------------
# Parts of kernels. A head is a pair (low, high) of tensors [rows, LOW] and [rows, HIGH]; HIGH = 0: low twice, and the
# second is not used. Capitals are known when a kernel is compiled; a pointer that a case does not use is given any
# tensor. Offsets within an image are 32-bit, the image's own is 64-bit.


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
def load_head(
    start_ptr,
    rows,
    LIMIT: tl.constexpr,
    STRIDE: tl.constexpr,
    HEAD: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
):
    low = load_part(start_ptr, rows, LIMIT, STRIDE, 0, LOW, HEAD)
    high = low
    if HIGH > 0:
        high = load_part(start_ptr, rows, LIMIT, STRIDE, LOW, HIGH, HEAD)
    return low, high


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
def store_head(
    start_ptr,
    low,
    high,
    rows,
    LIMIT: tl.constexpr,
    STRIDE: tl.constexpr,
    HEAD: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
):
    store_part(start_ptr, low, rows, LIMIT, STRIDE, 0, LOW, HEAD)
    if HIGH > 0:
        store_part(start_ptr, high, rows, LIMIT, STRIDE, LOW, HIGH, HEAD)


@kernel
def zero_head(ROWS: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr):
    low = tl.zeros([ROWS, LOW], tl.float32)
    high = low
    if HIGH > 0:
        high = tl.zeros([ROWS, HIGH], tl.float32)
    return low, high


@kernel
def scores(a_low, a_high, b_low, b_high, HIGH: tl.constexpr):
    """a b^T over a whole head."""
    s = tl.dot(a_low, tl.trans(b_low), input_precision="ieee")
    if HIGH > 0:
        s = tl.dot(a_high, tl.trans(b_high), s, input_precision="ieee")
    return s


@kernel
def add_product(p, x_low, x_high, sum_low, sum_high, HIGH: tl.constexpr):
    """sum + p x, where x is a head."""
    sum_low = tl.dot(p, x_low, sum_low, input_precision="ieee")
    if HIGH > 0:
        sum_high = tl.dot(p, x_high, sum_high, input_precision="ieee")
    return sum_low, sum_high


@kernel
def allowed_keys(mask_ptr, image, keys, KEYS: tl.constexpr, HAS_MASK: tl.constexpr):
    allowed = keys < KEYS
    if HAS_MASK:
        allowed = allowed & (tl.load(mask_ptr + image * KEYS + keys, mask=allowed, other=0) != 0)
    return allowed


# ---------------------------------------------------------------------------------------------------------------
# Kernels. A token of q_ptr has Q_STRIDE numbers, of which the first HEADS x HEAD are queries; a token of kv_ptr has
# KV_STRIDE, in which keys begin at K_FIRST and values right behind them. Self-attention's two pointers are the same.


@kernel
def attention_kernel(
    q_ptr,
    kv_ptr,
    mask_ptr,
    o_ptr,
    z_ptr,
    Q_STRIDE: tl.constexpr,
    KV_STRIDE: tl.constexpr,
    K_FIRST: tl.constexpr,
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
    """o and z of some queries of one head of one image."""
    blocks: tl.constexpr = (TOKENS + ROWS - 1) // ROWS
    width: tl.constexpr = HEADS * HEAD
    rows = (tl.program_id(0) % blocks) * ROWS + tl.arange(0, ROWS)
    head = (tl.program_id(0) // blocks) % HEADS
    image = tl.program_id(0) // (blocks * HEADS)
    q_ptr += image.to(tl.int64) * (TOKENS * Q_STRIDE) + head * HEAD
    k_ptr = kv_ptr + image.to(tl.int64) * (KEYS * KV_STRIDE) + (K_FIRST + head * HEAD)
    o_ptr += image.to(tl.int64) * (TOKENS * width) + head * HEAD
    # exp(c x) = 2^(c log2(e) x): the hardware has powers of two
    power: tl.constexpr = HEAD**-0.5 * 1.4426950408889634

    q_low, q_high = load_head(q_ptr, rows, TOKENS, Q_STRIDE, HEAD, LOW, HIGH)
    o_low, o_high = zero_head(ROWS, LOW, HIGH)
    highest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    for first in range(0, KEYS, COLUMNS):
        keys = first + tl.arange(0, COLUMNS)
        k_low, k_high = load_head(k_ptr, keys, KEYS, KV_STRIDE, HEAD, LOW, HIGH)
        s = scores(q_low, q_high, k_low, k_high, HIGH) * power
        if HAS_MASK or KEYS % COLUMNS != 0:
            # finite: a block without one allowed key must not make a NaN; the first allowed key outweighs it
            s = tl.where(allowed_keys(mask_ptr, image, keys, KEYS, HAS_MASK)[None, :], s, -1.0e30)
        higher = tl.maximum(highest, tl.max(s, axis=1))
        p = tl.exp2(s - higher[:, None])
        fade = tl.exp2(highest - higher)
        highest = higher
        total = total * fade + tl.sum(p, axis=1)
        v_low, v_high = load_head(k_ptr + width, keys, KEYS, KV_STRIDE, HEAD, LOW, HIGH)
        p = p.to(kv_ptr.dtype.element_ty)
        o_low *= fade[:, None]
        if HIGH > 0:
            o_high *= fade[:, None]
        o_low, o_high = add_product(p, v_low, v_high, o_low, o_high, HIGH)

    store_head(o_ptr, o_low / total[:, None], o_high / total[:, None], rows, TOKENS, width, HEAD, LOW, HIGH)
    tl.store(z_ptr + (image * HEADS + head) * TOKENS + rows, highest + tl.log2(total), mask=rows < TOKENS)


@kernel
def dq_kernel(
    q_ptr,
    kv_ptr,
    mask_ptr,
    o_ptr,
    z_ptr,
    do_ptr,
    dq_ptr,
    delta_ptr,
    Q_STRIDE: tl.constexpr,
    KV_STRIDE: tl.constexpr,
    K_FIRST: tl.constexpr,
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
    """dq and delta of some queries of one head of one image."""
    blocks: tl.constexpr = (TOKENS + ROWS - 1) // ROWS
    width: tl.constexpr = HEADS * HEAD
    rows = (tl.program_id(0) % blocks) * ROWS + tl.arange(0, ROWS)
    head = (tl.program_id(0) // blocks) % HEADS
    image = tl.program_id(0) // (blocks * HEADS)
    q_start = image.to(tl.int64) * (TOKENS * Q_STRIDE) + head * HEAD
    o_start = image.to(tl.int64) * (TOKENS * width) + head * HEAD
    k_ptr = kv_ptr + image.to(tl.int64) * (KEYS * KV_STRIDE) + (K_FIRST + head * HEAD)
    token = (image * HEADS + head) * TOKENS + rows
    factor: tl.constexpr = HEAD**-0.5
    power: tl.constexpr = HEAD**-0.5 * 1.4426950408889634

    # a row beyond the sequence has q = do = 0 and delta = 0, so ds = 0 whatever its p
    q_low, q_high = load_head(q_ptr + q_start, rows, TOKENS, Q_STRIDE, HEAD, LOW, HIGH)
    do_low, do_high = load_head(do_ptr + o_start, rows, TOKENS, width, HEAD, LOW, HIGH)
    o_low, o_high = load_head(o_ptr + o_start, rows, TOKENS, width, HEAD, LOW, HIGH)
    z = tl.load(z_ptr + token, mask=rows < TOKENS, other=0.0)
    delta = tl.sum(o_low.to(tl.float32) * do_low.to(tl.float32), axis=1)
    if HIGH > 0:
        delta += tl.sum(o_high.to(tl.float32) * do_high.to(tl.float32), axis=1)
    tl.store(delta_ptr + token, delta, mask=rows < TOKENS)

    dq_low, dq_high = zero_head(ROWS, LOW, HIGH)
    for first in range(0, KEYS, COLUMNS):
        keys = first + tl.arange(0, COLUMNS)
        k_low, k_high = load_head(k_ptr, keys, KEYS, KV_STRIDE, HEAD, LOW, HIGH)
        v_low, v_high = load_head(k_ptr + width, keys, KEYS, KV_STRIDE, HEAD, LOW, HIGH)
        s = scores(q_low, q_high, k_low, k_high, HIGH)
        dp = scores(do_low, do_high, v_low, v_high, HIGH)
        p = tl.exp2(s * power - z[:, None])
        if HAS_MASK or KEYS % COLUMNS != 0:
            p = tl.where(allowed_keys(mask_ptr, image, keys, KEYS, HAS_MASK)[None, :], p, 0.0)
        ds = (p * (dp - delta[:, None])).to(kv_ptr.dtype.element_ty)
        dq_low, dq_high = add_product(ds, k_low, k_high, dq_low, dq_high, HIGH)
    store_head(dq_ptr + q_start, factor * dq_low, factor * dq_high, rows, TOKENS, Q_STRIDE, HEAD, LOW, HIGH)


@kernel
def dkv_kernel(
    q_ptr,
    kv_ptr,
    mask_ptr,
    z_ptr,
    do_ptr,
    delta_ptr,
    dkv_ptr,
    Q_STRIDE: tl.constexpr,
    KV_STRIDE: tl.constexpr,
    K_FIRST: tl.constexpr,
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
    """dk and dv of some keys of one head of one image. Scores have a row for each key."""
    blocks: tl.constexpr = (KEYS + COLUMNS - 1) // COLUMNS
    width: tl.constexpr = HEADS * HEAD
    keys = (tl.program_id(0) % blocks) * COLUMNS + tl.arange(0, COLUMNS)
    head = (tl.program_id(0) // blocks) % HEADS
    image = tl.program_id(0) // (blocks * HEADS)
    q_ptr += image.to(tl.int64) * (TOKENS * Q_STRIDE) + head * HEAD
    do_ptr += image.to(tl.int64) * (TOKENS * width) + head * HEAD
    k_start = image.to(tl.int64) * (KEYS * KV_STRIDE) + (K_FIRST + head * HEAD)
    z_ptr += (image * HEADS + head) * TOKENS
    delta_ptr += (image * HEADS + head) * TOKENS
    factor: tl.constexpr = HEAD**-0.5
    power: tl.constexpr = HEAD**-0.5 * 1.4426950408889634
    number = kv_ptr.dtype.element_ty

    allowed = allowed_keys(mask_ptr, image, keys, KEYS, HAS_MASK)
    k_low, k_high = load_head(kv_ptr + k_start, keys, KEYS, KV_STRIDE, HEAD, LOW, HIGH)
    v_low, v_high = load_head(kv_ptr + k_start + width, keys, KEYS, KV_STRIDE, HEAD, LOW, HIGH)
    dk_low, dk_high = zero_head(COLUMNS, LOW, HIGH)
    dv_low, dv_high = zero_head(COLUMNS, LOW, HIGH)
    for first in range(0, TOKENS, ROWS):
        rows = first + tl.arange(0, ROWS)
        # a row beyond the sequence has q = do = 0, so it adds nothing to dk and dv whatever its p
        q_low, q_high = load_head(q_ptr, rows, TOKENS, Q_STRIDE, HEAD, LOW, HIGH)
        do_low, do_high = load_head(do_ptr, rows, TOKENS, width, HEAD, LOW, HIGH)
        s = scores(k_low, k_high, q_low, q_high, HIGH)
        dp = scores(v_low, v_high, do_low, do_high, HIGH)
        z = tl.load(z_ptr + rows, mask=rows < TOKENS, other=0.0)
        delta = tl.load(delta_ptr + rows, mask=rows < TOKENS, other=0.0)
        p = tl.exp2(s * power - z[None, :])
        if HAS_MASK or KEYS % COLUMNS != 0:
            p = tl.where(allowed[:, None], p, 0.0)
        ds = (p * (dp - delta[None, :])).to(number)
        dv_low, dv_high = add_product(p.to(number), do_low, do_high, dv_low, dv_high, HIGH)
        dk_low, dk_high = add_product(ds, q_low, q_high, dk_low, dk_high, HIGH)
    store_head(dkv_ptr + k_start, factor * dk_low, factor * dk_high, keys, KEYS, KV_STRIDE, HEAD, LOW, HIGH)
    store_head(dkv_ptr + k_start + width, dv_low, dv_high, keys, KEYS, KV_STRIDE, HEAD, LOW, HIGH)


# ---------------------------------------------------------------------------------------------------------------


def can_attend(q: Tensor, kv: Tensor | None, heads: int) -> bool:
    """whether `attend` takes these tensors: in half precision, of sizes the kernels were made and tested for."""
    tokens, columns = q.shape[1:]
    keys, width = (tokens, columns // 3) if kv is None else (kv.shape[1], columns)
    head = width // heads
    return (
        available(q) and min(tokens, keys) >= 1 and max(tokens, keys) <= LONGEST and 16 <= head <= 128 and head % 8 == 0
    )


def attend(q: Tensor, kv: Tensor | None, mask: Tensor | None, heads: int) -> Tensor:
    """Every token reads keys and values: [B, N, D].

    Self-attention: q [B, N, 3 D] holds queries, keys and values, kv is None. Cross-attention: q [B, N, D] holds
    queries, kv [B, L, 2 D] keys and values; mask, bool [B, L], is True where a key may be read: at least one in a row.
    """
    assert can_attend(q, kv, heads), f"no kernel for {list(q.shape)} and {None if kv is None else list(kv.shape)}"
    assert kv is None or kv.shape == (len(q), kv.shape[1], 2 * q.shape[2]), f"queries {list(q.shape)}, {list(kv.shape)}"
    if mask is not None:
        assert kv is not None
        assert mask.dtype == torch.bool, f"mask of {mask.dtype}"
        assert mask.shape == kv.shape[:2], f"mask {list(mask.shape)}, keys and values {list(kv.shape)}"
        mask = mask.contiguous()
    o: Tensor = _attention(q.contiguous(), None if kv is None else kv.contiguous(), mask, heads)[0]
    return o


@operator("attention")
def _attention(q: Tensor, kv: Tensor | None, mask: Tensor | None, heads: int) -> tuple[Tensor, Tensor]:
    """o [B, N, D], and z in powers of two, float32 [B, H, N]."""
    sizes = sizes_of(q, kv, mask, heads, "")
    tokens = sizes["TOKENS"]
    o = q.new_empty(len(q), tokens, heads * sizes["HEAD"])
    z = q.new_empty(len(q), heads, tokens, dtype=torch.float32)
    wrap_triton(attention_kernel)[(len(q) * heads * -(-tokens // sizes["ROWS"]),)](
        q_ptr=q,
        kv_ptr=q if kv is None else kv,
        mask_ptr=q if mask is None else mask,
        o_ptr=o,
        z_ptr=z,
        **sizes,
    )
    return o, z


@operator("attention_backward")
def _attention_backward(
    do: Tensor, q: Tensor, kv: Tensor | None, mask: Tensor | None, heads: int, o: Tensor, z: Tensor
) -> tuple[Tensor, Tensor]:
    """dq and dkv; without kv the first is all three, and the second is nothing."""
    sizes, dkv_sizes = sizes_of(q, kv, mask, heads, "_dq"), sizes_of(q, kv, mask, heads, "_dkv")
    dq, delta = torch.empty_like(q), torch.empty_like(z)
    dkv = q.new_empty(0) if kv is None else torch.empty_like(kv)
    wrap_triton(dq_kernel)[(len(q) * heads * -(-sizes["TOKENS"] // sizes["ROWS"]),)](
        q_ptr=q,
        kv_ptr=q if kv is None else kv,
        mask_ptr=q if mask is None else mask,
        o_ptr=o,
        z_ptr=z,
        do_ptr=do,
        dq_ptr=dq,
        delta_ptr=delta,
        **sizes,
    )
    wrap_triton(dkv_kernel)[(len(q) * heads * -(-sizes["KEYS"] // dkv_sizes["COLUMNS"]),)](
        q_ptr=q,
        kv_ptr=q if kv is None else kv,
        mask_ptr=q if mask is None else mask,
        z_ptr=z,
        do_ptr=do,
        delta_ptr=delta,
        dkv_ptr=dq if kv is None else dkv,
        **dkv_sizes,
    )
    return dq, dkv


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, kv, mask, ctx.heads = inputs
    ctx.save_for_backward(q, kv, mask, *output)


def _gradient(ctx: Any, do: Tensor, _dz: Any) -> tuple[Tensor | None, ...]:
    q, kv, mask, o, z = ctx.saved_tensors
    dq, dkv = _attention_backward(do.contiguous(), q, kv, mask, ctx.heads, o, z)
    return dq, None if kv is None else dkv, None, None


if triton is not None:
    _attention.register_autograd(_gradient, setup_context=_keep)


def sizes_of(q: Tensor, kv: Tensor | None, mask: Tensor | None, heads: int, pass_: str) -> dict[str, Any]:
    """What a kernel knows when it is compiled; `pass_` is empty for the forward one, _dq or _dkv."""
    tokens, columns = q.shape[1:]
    width = columns // 3 if kv is None else columns
    keys, head = tokens if kv is None else kv.shape[1], width // heads
    tile = TILES[("self" if kv is None else "cross") + pass_]
    low = max(16, power_of_two(head + 1) // 2)
    return {
        "Q_STRIDE": columns,
        "KV_STRIDE": 3 * width if kv is None else 2 * width,
        "K_FIRST": width if kv is None else 0,
        "HAS_MASK": mask is not None,
        "TOKENS": tokens,
        "KEYS": keys,
        "HEADS": heads,
        "HEAD": head,
        "LOW": low,
        "HIGH": max(16, power_of_two(head - low)) if head > low else 0,
        "ROWS": max(16, min(tile.rows, power_of_two(tokens))),
        "COLUMNS": max(16, min(tile.columns, power_of_two(keys))),
        "num_warps": tile.warps,
        "num_stages": tile.stages,
    }
