"""Attention of short sequences, where the linear maps leave and want their numbers: no head is moved, nothing stacked.

For one head of width d, tokens i, keys j, c = d^-1/2:

    s = c q k^T,   p_ij = exp(s_ij - z_i),   z_i = log sum_j exp s_ij,   o = p v

    dv = p^T do,   dp = do v^T,   ds = p (dp - delta),   delta_i = sum_j p_ij dp_ij = do_i . o_i
    dq = c ds k,   dk = c ds^T q

    biases of q, k, v: sum_i dq_i;   0, as sum_j ds_ij = 0;   sum_j dv_j

z is kept (in powers of two), p is made again, twice: the backward pass is two kernels, one for dq (and delta), whose
programs hold some queries and pass the keys by, and one for dk and dv, the other way round. One kernel for all three
saves two products of seven, but holds so much that a multiprocessor has room for one program, which mostly waits.
Tensor cores want widths of 16 x 2^n: a head is cut in a LOW and a HIGH part, 72 = 64 + 8 of 16, not 72 of 128.

**ptxas 12.8 makes wrong code of some tiles**: in a product with a HIGH part of keys it adds to a register it never set,
and tensor cores read beyond shared memory (seen in the machine code and by compute-sanitizer; cross-attention with 128
keys a block on an H200). Tiles are chosen among those it does not; training/trust.py looks all the same.
"""

# Triton reads the annotations of kernels; they can say nothing of pointers
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .launch import HALF_TYPES, available, differentiate, kernel, operator, power_of_two, tl, wrap_triton

LONGEST_ATTENTION = 256  # tokens or keys: what these kernels were measured and tested for


def attends(h: Tensor, tokens: int, keys: int, head: int) -> bool:
    """Whether the attention kernels take these sizes; float32 is left to torch, which keeps all its digits."""
    return available(h) and h.dtype in HALF_TYPES and fits(tokens, keys, head)


def fits(tokens: int, keys: int, head: int) -> bool:
    """Whether the attention kernels were made, and tested, for these sizes."""
    return min(tokens, keys) >= 1 and max(tokens, keys) <= LONGEST_ATTENTION and 16 <= head <= 128 and head % 8 == 0


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


ATTENTION_TILES = {
    "self": AttentionTile(rows=64, columns=64, warps=4, stages=2),
    "self_dq": AttentionTile(rows=64, columns=32, warps=4, stages=3),
    "self_dkv": AttentionTile(rows=32, columns=64, warps=4, stages=3),
    "cross": AttentionTile(rows=64, columns=16, warps=4, stages=3),
    "cross_dq": AttentionTile(rows=64, columns=32, warps=4, stages=2),
    "cross_dkv": AttentionTile(rows=32, columns=64, warps=4, stages=3),
}


# ---------------------------------------------------------------------------------------------------------------
# Kernels. `HAS_...` and capitals are known when the kernel is compiled; a pointer that a case does not use is given
# any tensor. Offsets within an image are 32-bit, the image's own is 64-bit.


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
def store_sum(share_ptr, low, high, LOW: tl.constexpr, HIGH: tl.constexpr, HEAD: tl.constexpr):
    """A program's share of the gradient of a bias: the sum of its rows."""
    columns = tl.arange(0, LOW)
    tl.store(share_ptr + columns, tl.sum(low, axis=0), mask=columns < HEAD)
    if HIGH > 0:
        columns = LOW + tl.arange(0, HIGH)
        tl.store(share_ptr + columns, tl.sum(high, axis=0), mask=columns < HEAD)


@kernel
def attend_dq(
    q_ptr,
    k_ptr,
    v_ptr,
    mask_ptr,
    o_ptr,
    z_ptr,
    do_ptr,
    dq_ptr,
    delta_ptr,
    bias_ptr,
    Q_STRIDE: tl.constexpr,
    KV_STRIDE: tl.constexpr,
    HAS_MASK: tl.constexpr,
    HAS_BIAS: tl.constexpr,
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
    block = tl.program_id(0) % blocks
    rows = block * ROWS + tl.arange(0, ROWS)
    head = (tl.program_id(0) // blocks) % HEADS
    image = tl.program_id(0) // (blocks * HEADS)
    q_start = image.to(tl.int64) * (TOKENS * Q_STRIDE) + head * HEAD
    k_start = image.to(tl.int64) * (KEYS * KV_STRIDE) + head * HEAD
    o_start = image.to(tl.int64) * (TOKENS * HEADS * HEAD) + head * HEAD
    q_ptr += q_start
    dq_ptr += q_start
    k_ptr += k_start
    v_ptr += k_start
    o_ptr += o_start
    do_ptr += o_start
    token = (image * HEADS + head) * TOKENS + rows
    factor: tl.constexpr = HEAD**-0.5
    power: tl.constexpr = HEAD**-0.5 * 1.4426950408889634
    number = k_ptr.dtype.element_ty

    # a row beyond the sequence has q = do = 0 and delta = 0, so ds = 0 whatever its p
    q_low = load_part(q_ptr, rows, TOKENS, Q_STRIDE, 0, LOW, HEAD)
    do_low = load_part(do_ptr, rows, TOKENS, HEADS * HEAD, 0, LOW, HEAD)
    o_low = load_part(o_ptr, rows, TOKENS, HEADS * HEAD, 0, LOW, HEAD)
    z = tl.load(z_ptr + token, mask=rows < TOKENS, other=0.0)
    delta = tl.sum(o_low.to(tl.float32) * do_low.to(tl.float32), axis=1)
    dq_low = tl.zeros([ROWS, LOW], tl.float32)
    dq_high = dq_low
    if HIGH > 0:
        q_high = load_part(q_ptr, rows, TOKENS, Q_STRIDE, LOW, HIGH, HEAD)
        do_high = load_part(do_ptr, rows, TOKENS, HEADS * HEAD, LOW, HIGH, HEAD)
        o_high = load_part(o_ptr, rows, TOKENS, HEADS * HEAD, LOW, HIGH, HEAD)
        delta += tl.sum(o_high.to(tl.float32) * do_high.to(tl.float32), axis=1)
        dq_high = tl.zeros([ROWS, HIGH], tl.float32)
    tl.store(delta_ptr + token, delta, mask=rows < TOKENS)

    for first in range(0, KEYS, COLUMNS):
        keys = first + tl.arange(0, COLUMNS)
        k_low = load_part(k_ptr, keys, KEYS, KV_STRIDE, 0, LOW, HEAD)
        v_low = load_part(v_ptr, keys, KEYS, KV_STRIDE, 0, LOW, HEAD)
        s = tl.dot(q_low, tl.trans(k_low), input_precision="ieee")
        dp = tl.dot(do_low, tl.trans(v_low), input_precision="ieee")
        if HIGH > 0:
            k_high = load_part(k_ptr, keys, KEYS, KV_STRIDE, LOW, HIGH, HEAD)
            v_high = load_part(v_ptr, keys, KEYS, KV_STRIDE, LOW, HIGH, HEAD)
            s = tl.dot(q_high, tl.trans(k_high), s, input_precision="ieee")
            dp = tl.dot(do_high, tl.trans(v_high), dp, input_precision="ieee")
        p = tl.exp2(s * power - z[:, None])
        if HAS_MASK or KEYS % COLUMNS != 0:
            p = tl.where(allowed_keys(mask_ptr, image, keys, KEYS, HAS_MASK)[None, :], p, 0.0)
        ds = (p * (dp - delta[:, None])).to(number)
        dq_low = tl.dot(ds, k_low, dq_low, input_precision="ieee")
        if HIGH > 0:
            dq_high = tl.dot(ds, k_high, dq_high, input_precision="ieee")

    dq_low *= factor
    dq_high *= factor
    store_part(dq_ptr, dq_low, rows, TOKENS, Q_STRIDE, 0, LOW, HEAD)
    if HIGH > 0:
        store_part(dq_ptr, dq_high, rows, TOKENS, Q_STRIDE, LOW, HIGH, HEAD)
    if HAS_BIAS:
        store_sum(bias_ptr + ((image * blocks + block) * HEADS + head) * HEAD, dq_low, dq_high, LOW, HIGH, HEAD)


@kernel
def attend_dkv(
    q_ptr,
    k_ptr,
    v_ptr,
    mask_ptr,
    z_ptr,
    do_ptr,
    delta_ptr,
    dk_ptr,
    dv_ptr,
    bias_ptr,
    Q_STRIDE: tl.constexpr,
    KV_STRIDE: tl.constexpr,
    HAS_MASK: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    TOKENS: tl.constexpr,
    KEYS: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """dk and dv of some keys of one head of one image. Scores stand with a row for each key."""
    blocks: tl.constexpr = (KEYS + COLUMNS - 1) // COLUMNS
    block = tl.program_id(0) % blocks
    keys = block * COLUMNS + tl.arange(0, COLUMNS)
    head = (tl.program_id(0) // blocks) % HEADS
    image = tl.program_id(0) // (blocks * HEADS)
    k_start = image.to(tl.int64) * (KEYS * KV_STRIDE) + head * HEAD
    q_ptr += image.to(tl.int64) * (TOKENS * Q_STRIDE) + head * HEAD
    k_ptr += k_start
    dk_ptr += k_start
    v_ptr += k_start
    dv_ptr += k_start
    do_ptr += image.to(tl.int64) * (TOKENS * HEADS * HEAD) + head * HEAD
    z_ptr += (image * HEADS + head) * TOKENS
    delta_ptr += (image * HEADS + head) * TOKENS
    factor: tl.constexpr = HEAD**-0.5
    power: tl.constexpr = HEAD**-0.5 * 1.4426950408889634
    number = k_ptr.dtype.element_ty

    allowed = allowed_keys(mask_ptr, image, keys, KEYS, HAS_MASK)
    k_low = load_part(k_ptr, keys, KEYS, KV_STRIDE, 0, LOW, HEAD)
    v_low = load_part(v_ptr, keys, KEYS, KV_STRIDE, 0, LOW, HEAD)
    dk_low = tl.zeros([COLUMNS, LOW], tl.float32)
    dv_low = tl.zeros([COLUMNS, LOW], tl.float32)
    dv_high = dv_low
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
        delta = tl.load(delta_ptr + rows, mask=rows < TOKENS, other=0.0)
        p = tl.exp2(s * power - z[None, :])
        if HAS_MASK or KEYS % COLUMNS != 0:
            p = tl.where(allowed[:, None], p, 0.0)
        ds = (p * (dp - delta[None, :])).to(number)
        p = p.to(number)
        dv_low = tl.dot(p, do_low, dv_low, input_precision="ieee")
        dk_low = tl.dot(ds, q_low, dk_low, input_precision="ieee")
        if HIGH > 0:
            dv_high = tl.dot(p, do_high, dv_high, input_precision="ieee")
            dk_high = tl.dot(ds, q_high, dk_high, input_precision="ieee")

    store_part(dk_ptr, factor * dk_low, keys, KEYS, KV_STRIDE, 0, LOW, HEAD)
    store_part(dv_ptr, dv_low, keys, KEYS, KV_STRIDE, 0, LOW, HEAD)
    if HIGH > 0:
        store_part(dk_ptr, factor * dk_high, keys, KEYS, KV_STRIDE, LOW, HIGH, HEAD)
        store_part(dv_ptr, dv_high, keys, KEYS, KV_STRIDE, LOW, HIGH, HEAD)
    if HAS_BIAS:
        store_sum(bias_ptr + ((image * blocks + block) * HEADS + head) * HEAD, dv_low, dv_high, LOW, HIGH, HEAD)


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
def self_attention_dq_kernel(
    qkv_ptr,
    o_ptr,
    z_ptr,
    do_ptr,
    dqkv_ptr,
    delta_ptr,
    bias_ptr,
    HAS_BIAS: tl.constexpr,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    width: tl.constexpr = HEADS * HEAD
    attend_dq(
        qkv_ptr,
        qkv_ptr + width,
        qkv_ptr + 2 * width,
        qkv_ptr,
        o_ptr,
        z_ptr,
        do_ptr,
        dqkv_ptr,
        delta_ptr,
        bias_ptr,
        3 * width,
        3 * width,
        False,
        HAS_BIAS,
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
def self_attention_dkv_kernel(
    qkv_ptr,
    z_ptr,
    do_ptr,
    delta_ptr,
    dqkv_ptr,
    bias_ptr,
    HAS_BIAS: tl.constexpr,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    width: tl.constexpr = HEADS * HEAD
    attend_dkv(
        qkv_ptr,
        qkv_ptr + width,
        qkv_ptr + 2 * width,
        qkv_ptr,
        z_ptr,
        do_ptr,
        delta_ptr,
        dqkv_ptr + width,
        dqkv_ptr + 2 * width,
        bias_ptr,
        3 * width,
        3 * width,
        False,
        HAS_BIAS,
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
def cross_attention_dq_kernel(
    q_ptr,
    kv_ptr,
    mask_ptr,
    o_ptr,
    z_ptr,
    do_ptr,
    dq_ptr,
    delta_ptr,
    bias_ptr,
    HAS_MASK: tl.constexpr,
    HAS_BIAS: tl.constexpr,
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
    attend_dq(
        q_ptr,
        kv_ptr,
        kv_ptr + width,
        mask_ptr,
        o_ptr,
        z_ptr,
        do_ptr,
        dq_ptr,
        delta_ptr,
        bias_ptr,
        width,
        2 * width,
        HAS_MASK,
        HAS_BIAS,
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
def cross_attention_dkv_kernel(
    q_ptr,
    kv_ptr,
    mask_ptr,
    z_ptr,
    do_ptr,
    delta_ptr,
    dkv_ptr,
    bias_ptr,
    HAS_MASK: tl.constexpr,
    HAS_BIAS: tl.constexpr,
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
    attend_dkv(
        q_ptr,
        kv_ptr,
        kv_ptr + width,
        mask_ptr,
        z_ptr,
        do_ptr,
        delta_ptr,
        dkv_ptr,
        dkv_ptr + width,
        bias_ptr,
        width,
        2 * width,
        HAS_MASK,
        HAS_BIAS,
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


def self_attention(qkv: Tensor, bias: Tensor | None = None) -> Tensor:
    """Every token asks every token: queries, keys and values [B, N, 3, H, d] -> [B, N, H d].

    bias [3 H d] is one that `qkv` holds already, detached: its gradient comes from here.
    """
    _images, tokens, three, _heads, head = qkv.shape
    assert three == 3, f"queries, keys and values are three, got {list(qkv.shape)}"
    assert fits(tokens, tokens, head), f"no kernel for {list(qkv.shape)}: see fits()"
    o: Tensor = _self_attention(qkv.contiguous(), bias)[0]
    return o


def cross_attention(
    q: Tensor, kv: Tensor, mask: Tensor | None, q_bias: Tensor | None = None, kv_bias: Tensor | None = None
) -> Tensor:
    """Queries [B, N, H, d] ask keys and values [B, L, 2, H, d] -> [B, N, H d].

    mask, bool [B, L], is True where a key may be read: at least one in every row. q_bias [H d] and kv_bias [2 H d]
    are those that q and kv hold already, detached.
    """
    images, tokens, heads, head = q.shape
    keys = kv.shape[1]
    assert fits(tokens, keys, head), f"no kernel for {list(q.shape)} and {keys} keys: see fits()"
    assert kv.shape == (images, keys, 2, heads, head), f"queries {list(q.shape)}, keys and values {list(kv.shape)}"
    if mask is not None:
        assert mask.dtype == torch.bool, f"mask of {mask.dtype}"
        assert mask.shape == (images, keys), f"mask {list(mask.shape)}, keys and values {list(kv.shape)}"
        mask = mask.contiguous()
    o: Tensor = _cross_attention(q.contiguous(), kv.contiguous(), mask, q_bias, kv_bias)[0]
    return o


@operator("self_attention")
def _self_attention(qkv: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """o [B, N, H d], and z in powers of two, float32 [B, H, N]."""
    images, tokens, _three, heads, head = qkv.shape
    sizes = self_sizes("self", qkv)
    o = qkv.new_empty(images, tokens, heads * head)
    z = qkv.new_empty(images, heads, tokens, dtype=torch.float32)
    programs = images * heads * -(-tokens // sizes["ROWS"])
    wrap_triton(self_attention_kernel)[(programs,)](qkv_ptr=qkv, o_ptr=o, z_ptr=z, **sizes)
    return o, z


@operator("self_attention_backward")
def _self_attention_backward(
    do: Tensor, biased: bool, qkv: Tensor, o: Tensor, z: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """dqkv, and if `biased` the shares of the gradients of q's and v's bias, float32 [B, blocks, H d]."""
    images, tokens, _three, heads, _head = qkv.shape
    sizes, dkv_sizes = self_sizes("self_dq", qkv), self_sizes("self_dkv", qkv)
    dqkv, delta = torch.empty_like(qkv), torch.empty_like(z)
    q_bias = bias_shares(o, -(-tokens // sizes["ROWS"]), biased)
    v_bias = bias_shares(o, -(-tokens // dkv_sizes["COLUMNS"]), biased)
    wrap_triton(self_attention_dq_kernel)[(images * heads * -(-tokens // sizes["ROWS"]),)](
        qkv_ptr=qkv,
        o_ptr=o,
        z_ptr=z,
        do_ptr=do,
        dqkv_ptr=dqkv,
        delta_ptr=delta,
        bias_ptr=q_bias,
        HAS_BIAS=biased,
        **sizes,
    )
    wrap_triton(self_attention_dkv_kernel)[(images * heads * -(-tokens // dkv_sizes["COLUMNS"]),)](
        qkv_ptr=qkv,
        z_ptr=z,
        do_ptr=do,
        delta_ptr=delta,
        dqkv_ptr=dqkv,
        bias_ptr=v_bias,
        HAS_BIAS=biased,
        **dkv_sizes,
    )
    return dqkv, q_bias, v_bias


def _self_attention_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    qkv, bias = inputs
    ctx.save_for_backward(qkv, *output)
    ctx.bias_type = None if bias is None else bias.dtype


def _self_attention_gradient(ctx: Any, do: Tensor, _dz: Any) -> tuple[Tensor | None, ...]:
    biased = ctx.bias_type is not None
    dqkv, q_bias, v_bias = _self_attention_backward(do.contiguous(), biased, *ctx.saved_tensors)
    if not biased:
        return dqkv, None
    q_bias, v_bias = q_bias.sum((0, 1)), v_bias.sum((0, 1))
    return dqkv, torch.cat([q_bias, torch.zeros_like(q_bias), v_bias]).to(ctx.bias_type)


differentiate(_self_attention, _self_attention_gradient, _self_attention_context)


@operator("cross_attention")
def _cross_attention(
    q: Tensor, kv: Tensor, mask: Tensor | None, q_bias: Tensor | None, kv_bias: Tensor | None
) -> tuple[Tensor, Tensor]:
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
    do: Tensor, biased: bool, q: Tensor, kv: Tensor, mask: Tensor | None, o: Tensor, z: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dq, dkv, and if `biased` the shares of the gradients of q's and v's bias, float32 [B, blocks, H d]."""
    images, tokens, heads, head = q.shape
    keys = kv.shape[1]
    sizes = ATTENTION_TILES["cross_dq"].of(tokens, keys, heads, head)
    dkv_sizes = ATTENTION_TILES["cross_dkv"].of(tokens, keys, heads, head)
    dq, dkv, delta = torch.empty_like(q), torch.empty_like(kv), torch.empty_like(z)
    q_bias = bias_shares(o, -(-tokens // sizes["ROWS"]), biased)
    v_bias = bias_shares(o, -(-keys // dkv_sizes["COLUMNS"]), biased)
    wrap_triton(cross_attention_dq_kernel)[(images * heads * -(-tokens // sizes["ROWS"]),)](
        q_ptr=q,
        kv_ptr=kv,
        mask_ptr=q if mask is None else mask,
        o_ptr=o,
        z_ptr=z,
        do_ptr=do,
        dq_ptr=dq,
        delta_ptr=delta,
        bias_ptr=q_bias,
        HAS_MASK=mask is not None,
        HAS_BIAS=biased,
        **sizes,
    )
    wrap_triton(cross_attention_dkv_kernel)[(images * heads * -(-keys // dkv_sizes["COLUMNS"]),)](
        q_ptr=q,
        kv_ptr=kv,
        mask_ptr=q if mask is None else mask,
        z_ptr=z,
        do_ptr=do,
        delta_ptr=delta,
        dkv_ptr=dkv,
        bias_ptr=v_bias,
        HAS_MASK=mask is not None,
        HAS_BIAS=biased,
        **dkv_sizes,
    )
    return dq, dkv, q_bias, v_bias


def _cross_attention_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, kv, mask, q_bias, kv_bias = inputs
    ctx.save_for_backward(q, kv, mask, *output)
    ctx.bias_types = [None if bias is None else bias.dtype for bias in (q_bias, kv_bias)]


def _cross_attention_gradient(ctx: Any, do: Tensor, _dz: Any) -> tuple[Tensor | None, ...]:
    q_type, kv_type = ctx.bias_types
    biased = q_type is not None or kv_type is not None
    dq, dkv, q_bias, v_bias = _cross_attention_backward(do.contiguous(), biased, *ctx.saved_tensors)
    dq_bias = None if q_type is None else q_bias.sum((0, 1)).to(q_type)
    v_bias = v_bias.sum((0, 1))
    dkv_bias = None if kv_type is None else torch.cat([torch.zeros_like(v_bias), v_bias]).to(kv_type)
    return dq, dkv, None, dq_bias, dkv_bias


differentiate(_cross_attention, _cross_attention_gradient, _cross_attention_context)


def self_sizes(tile: str, qkv: Tensor) -> dict[str, Any]:
    """A kernel's sizes where tokens are the keys."""
    _images, tokens, _three, heads, head = qkv.shape
    sizes = ATTENTION_TILES[tile].of(tokens, tokens, heads, head)
    del sizes["KEYS"]
    return sizes


def bias_shares(o: Tensor, blocks: int, biased: bool) -> Tensor:
    """Room for the share that every program has in a bias's gradient, float32 [B, blocks, H d]; else for nothing."""
    shape = (o.shape[0], blocks, o.shape[2]) if biased else (1, 1, 1)
    return torch.empty(shape, dtype=torch.float32, device=o.device)
