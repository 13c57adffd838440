"""A transformer block out of the fused operators: the same answer as dit.Block's own formulas, in fewer passes.

Beyond the operators themselves it saves what only a look at several of them together can save:
- Every bias is held by what its linear map gives, but its gradient is summed by the operator that follows, which has
  the numbers in its hands.
- A tensor that goes two ways (the residual stream) gets its gradient in one pass: the product or norm on one way adds
  what came back on the other.
- The MLP keeps what enters the activation and not what leaves it.

With `float8` the long products, of queries, keys and values together and of the MLP, are of 8-bit numbers: float8.py.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .attention import attends, cross_attention, self_attention
from .epilogue import ends_in_gelu
from .float8 import mapped, pulled, rounds_well
from .tokens import add_norm_modulate, gated_add, gelu_backward, keep_and_norm

Branch = tuple[Tensor, Tensor | None]  # [B, N, D], and the bias whose gradient whoever adds the branch must sum


def fused_block(
    block: Any, h: Tensor, six: tuple[Tensor, ...], text: Tensor | None, mask: Tensor | None, eps: float
) -> Tensor:
    """As Block's own: tokens [B, N, D], six vectors [B, 1, D] -> tokens; eps is the first norm's."""
    float8 = block.float8 and torch.is_grad_enabled() and rounds_well(block.width, block.mlp.enter.out_features)
    shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = six
    h, y = keep_and_norm(h, shift, scale, eps)
    branch, bias = to_themselves(block.attention, y, float8)
    joined_by: Tensor | None = gate
    if block.cross is not None:
        assert text is not None
        h = gated_add(h, gate, branch, bias)
        h, (branch, bias) = to_text(block.cross, h, text, mask)
        joined_by = None
    h, y = add_norm_modulate(h, branch, joined_by, mlp_shift, mlp_scale, block.mlp_norm_eps, bias)
    branch, bias = through_mlp(block.mlp, y, float8)
    return gated_add(h, mlp_gate, branch, bias)


def to_themselves(attention: Any, y: Tensor, float8: bool) -> Branch:
    """Self-attention of tokens."""
    tokens, width = y.shape[1:]
    if attention.norm is not None or not attends(y, tokens, tokens, width // attention.heads):
        return attention(y), None
    qkv = held(attention.qkv, y, float8).unflatten(2, (3, attention.heads, -1))
    return held(attention.out, self_attention(qkv, attention.qkv.bias)), attention.out.bias


def to_text(cross: Any, h: Tensor, text: Tensor, mask: Tensor | None) -> tuple[Tensor, Branch]:
    """The tokens as they came, and what they read in the text."""
    tokens, width = h.shape[1:]
    if cross.norm is not None or not attends(h, tokens, text.shape[1], width // cross.heads):
        return h, (cross(h, text, mask), None)
    h, q = _KeepAndMap.apply(h, cross.q.weight, cross.q.bias.detach())  # type: ignore[no-untyped-call]
    q = q.unflatten(2, (cross.heads, -1))
    kv = held(cross.kv, text.to(h.dtype)).unflatten(2, (2, cross.heads, -1))
    mask = None if mask is None else mask.flatten(1)
    return h, (held(cross.out, cross_attention(q, kv, mask, cross.q.bias, cross.kv.bias)), cross.out.bias)


def through_mlp(mlp: Any, y: Tensor, float8: bool) -> Branch:
    if not isinstance(mlp.activation, nn.GELU) or mlp.activation.approximate != "tanh" or ends_in_gelu(y):
        return mlp(y), None
    enter, leave = mlp.enter, mlp.leave
    branch = _Mlp.apply(  # type: ignore[no-untyped-call]
        y, enter.weight, enter.bias, leave.weight, leave.bias.detach(), float8
    )
    return branch, leave.bias


def held(linear: nn.Linear, x: Tensor, float8: bool = False) -> Tensor:
    """The linear map of x, its bias without a gradient: somebody else sums it."""
    if float8:
        answer: Tensor = _Map8.apply(x, linear.weight, linear.bias.detach())  # type: ignore[no-untyped-call]
        return answer
    return F.linear(x, linear.weight.to(x.dtype), linear.bias.detach().to(x.dtype))


# Weights are kept as they are and brought to the tokens' type once more in the backward pass: a copy of all of them
# kept for it would be a gigabyte and a half for an XL/2.


class _Map8(torch.autograd.Function):
    """W x + b of 8-bit numbers; the bias gets no gradient here."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return mapped(x.flatten(0, -2), weight, bias).view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        dy = dy.flatten(0, -2)
        return pulled(dy, weight).view_as(x), (dy.t() @ x.flatten(0, -2)).to(weight.dtype), None


class _KeepAndMap(torch.autograd.Function):
    """h itself and W h + b; dh = dkept + dy W is one product that adds. The bias gets no gradient here."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(h, weight)
        return h.view_as(h), F.linear(h, weight.to(h.dtype), bias.to(h.dtype))

    @staticmethod
    def backward(ctx: Any, dkept: Tensor, dy: Tensor) -> tuple[Tensor | None, ...]:
        h, weight = ctx.saved_tensors
        dy = dy.flatten(0, -2)
        dh = torch.addmm(dkept.flatten(0, -2), dy, weight.to(h.dtype)).view_as(h)
        return dh, (dy.t() @ h.flatten(0, -2)).to(weight.dtype), None


class _Mlp(torch.autograd.Function):
    """Linear, GELU in its tanh form, linear; the last bias gets no gradient here."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, enter: Tensor, bias: Tensor, leave: Tensor, last_bias: Tensor, float8: bool
    ) -> Tensor:
        ctx.bias_type, ctx.float8 = bias.dtype, float8
        rows = x.flatten(0, -2)
        if float8:
            hidden = mapped(rows, enter, bias)
            y = mapped(hidden, leave, last_bias, gelu=True)
        else:
            hidden = F.linear(rows, enter.to(x.dtype), bias.to(x.dtype))
            y = F.linear(F.gelu(hidden, approximate="tanh"), leave.to(x.dtype), last_bias.to(x.dtype))
        ctx.save_for_backward(x, hidden, enter, leave)
        return y.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, hidden, enter, leave = ctx.saved_tensors
        rows, dy = x.flatten(0, -2), dy.flatten(0, -2)
        dactivated = pulled(dy, leave) if ctx.float8 else dy @ leave.to(x.dtype)
        dhidden, activated, dbias = gelu_backward(dactivated, hidden)
        dx = pulled(dhidden, enter) if ctx.float8 else dhidden @ enter.to(x.dtype)
        denter, dleave = (dhidden.t() @ rows).to(enter.dtype), (dy.t() @ activated).to(leave.dtype)
        return dx.view_as(x), denter, dbias.to(ctx.bias_type), dleave, None, None
