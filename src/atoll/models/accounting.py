"""What a network costs: parameters, arithmetic and memory, before anything is allocated.

Counted on the meta device, where tensors have shapes and no memory: parameters, the FLOPs of all matrix products of one
forward pass (two per multiply-add; element-wise work is left out, as everywhere), and the tensors that autograd keeps.
A new option of a network is counted as it is computed. Blocks are alike, so a network of two of them is enough.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from ..diffusion.condition import Condition
from .dit import DiT, DiTConfig

FLOAT32 = 4
BFLOAT16 = 2


@dataclass(frozen=True)
class Cost:
    """One architecture's cost, whatever it is trained on; training/memory.py makes GiB and seconds of it."""

    parameters: int
    fixed: int  # values of the sin-cos position table, which some papers count as parameters
    flops_forward: int  # per image
    block_input_values: int  # per image and block: all that a checkpointed block keeps
    block_values: int  # per image: what one block keeps for the backward pass
    other_values: int  # per image: the same for everything outside the blocks
    depth: int

    @property
    def flops_training(self) -> int:
        """Forward + backward per image: the backward pass costs two forward passes."""
        return 3 * self.flops_forward

    def activation_bytes(self, micro_batch: int, *, recomputed_blocks: int = 0, value_bytes: int = BFLOAT16) -> int:
        """Kept for the backward pass of one micro-batch; one recomputed block at a time is rebuilt whole."""
        recomputed_blocks = min(recomputed_blocks, self.depth)
        whole = self.depth - recomputed_blocks + (1 if recomputed_blocks else 0)
        values = whole * self.block_values + recomputed_blocks * self.block_input_values + self.other_values
        return micro_batch * value_bytes * values


@lru_cache(maxsize=1024)
def account(config: DiTConfig) -> Cost:
    with torch.device("meta"):
        network, inputs = DiT(replace(config, depth=2)).to("meta"), meta_inputs(config)
    own = {tensor.untyped_storage()._cdata for tensor in (*network.parameters(), *network.buffers())}
    kept: dict[int, Tensor] = {}  # by storage; held, so that no storage takes the place of another
    counter, attention = FlopCounterMode(display=False), CountedAttention()

    def keep(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage()._cdata not in own:
            kept[tensor.untyped_storage()._cdata] = tensor
        return tensor

    def so_far() -> tuple[int, int]:
        """FLOPs, and values that are kept for the backward pass."""
        values = sum(t.untyped_storage().nbytes() // t.element_size() for t in kept.values())
        return counter.get_total_flops() + attention.flops, values

    marks: list[tuple[int, int]] = []
    network.blocks[1].register_forward_pre_hook(lambda *_: marks.append(so_far()))
    network.blocks[1].register_forward_hook(lambda *_: marks.append(so_far()))
    with counter, attention, torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        network(*inputs)
    (flops, values), (block_flops, block_values) = so_far(), (b - a for a, b in zip(*marks, strict=True))
    block_parameters, parameters = (sum(p.numel() for p in m.parameters()) for m in (network.blocks[1], network))
    more = config.depth - 2
    return Cost(
        parameters=parameters + more * block_parameters,
        fixed=config.image_tokens * config.width if config.positions == "sincos" else 0,
        flops_forward=flops + more * block_flops,
        block_input_values=config.image_tokens * config.width,
        block_values=block_values,
        other_values=values - 2 * block_values,
        depth=config.depth,
    )


def flops_forward(config: DiTConfig) -> int:
    """Floating-point operations of one forward pass for one image: two per multiply-add."""
    return account(config).flops_forward


def meta_inputs(config: DiTConfig) -> tuple[Tensor, Tensor, Condition | None]:
    """One image's (x, time, condition) for a network."""
    length, width = config.text_length or 1, config.text_width or 1
    condition = None
    if config.condition != "none":
        words = config.condition == "words"
        condition = Condition(
            labels=torch.empty(1, dtype=torch.int64),
            pooled=torch.empty(1, width),
            tokens=torch.empty(1, length, dtype=torch.int64) if words else torch.empty(1, length, width),
        )
    return torch.empty(1, *config.latent), torch.empty(1), condition


class CountedAttention(TorchFunctionMode):
    """Attention as GPUs compute it: it keeps inputs and output, and no matrix of weights, as torch's for meta does."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is not F.scaled_dot_product_attention:
            return function(*args, **(kwargs or {}))
        q, k, v = args
        self.flops += 4 * q.numel() * k.shape[-2]  # scores, and their product with values
        return KeptAttention.apply(q, k, v)  # type: ignore[no-untyped-call]


class KeptAttention(torch.autograd.Function):
    """The shape of an attention's output, and what its backward pass needs."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        output = torch.empty_like(q)
        ctx.save_for_backward(q, k, v, output)
        return output
