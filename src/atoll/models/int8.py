"""Weights in eight bits: half the memory of bfloat16, made wide again as they are used.

One scale per output channel, symmetric:  w ~ q s,  s = max |w| / 127,  q = round(w / s) in -127 .. 127. The scale is
rounded to bfloat16 before q is taken, so that rounding it again costs nothing. Activations stay as they are.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

LARGEST = 127.0
CODES, SCALE = "codes", "scale"  # in place of a weight "a.b.weight": "a.b.codes" and "a.b.scale"


class Int8Linear(nn.Module):
    """A linear map whose weight is kept as q int8 [N, K] and s bfloat16 [N], and made of them when it is used."""

    codes: Tensor
    scale: Tensor

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.register_buffer(CODES, torch.empty(outputs, inputs, dtype=torch.int8))
        self.register_buffer(SCALE, torch.empty(outputs, dtype=torch.bfloat16))
        self.bias = nn.Parameter(torch.empty(outputs))

    @property
    def weight(self) -> Tensor:
        """[N, K], of the bias's type."""
        return widened(self.codes, self.scale, self.bias.dtype)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


def quantised(weight: Tensor) -> tuple[Tensor, Tensor]:
    """(q, s) of a weight [N, K]; a row of zeros has s = 1."""
    largest = weight.abs().amax(dim=1).float()
    scale = torch.where(largest > 0, largest / LARGEST, 1.0).to(torch.bfloat16)
    q = (weight.float() / scale.float()[:, None]).round().clamp(-LARGEST, LARGEST)
    return q.to(torch.int8), scale


def widened(q: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return q.to(dtype) * scale.to(dtype)[:, None]


def to_int8(network: nn.Module) -> nn.Module:
    """Put Int8Linear in place of the linear maps of a network's blocks, which hold nearly all of its weights.

    For networks on the meta device: nothing is converted here.
    """
    blocks = network.blocks
    assert isinstance(blocks, nn.ModuleList)
    for module in list(blocks.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear):
                setattr(module, name, Int8Linear(child.in_features, child.out_features))
    return network
