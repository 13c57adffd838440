"""GELU at the end of the matrix product before it, for whoever asks for no gradient: one kernel of cuBLAS."""

from __future__ import annotations

import torch
from torch import Tensor

from .launch import HALF_TYPES, Switch, available


def ends_in_gelu(x: Tensor) -> bool:
    """Whether linear_gelu takes this tensor: the product's own epilogue knows no gradient, and rounds once."""
    return Switch.epilogue and available(x) and x.dtype in HALF_TYPES and not torch.is_grad_enabled()


def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """GELU(x weight^T + bias), by its tanh formula, [..., K] -> [..., N], in x's type: autocast knows nothing of it."""
    bias, weight = bias.to(x.dtype), weight.to(x.dtype)
    rows = torch._addmm_activation(bias, x.flatten(0, -2), weight.t(), use_gelu=True)
    answer: Tensor = rows.unflatten(0, x.shape[:-1])
    return answer
