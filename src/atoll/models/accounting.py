"""What a network costs: parameters, arithmetic and memory, before anything is allocated.

Counted, not measured: parameters on the meta device, FLOPs as 2 x (rows x inputs x outputs) of every matrix
product (element-wise work is left out, as everywhere), activations as the tensors an eager backward pass
keeps. A compiled step keeps somewhat fewer: training/memory.py has the share, and what else takes memory.
"""

from __future__ import annotations

from dataclasses import dataclass

from .dit import TIME_FREQUENCIES, DiT, DiTConfig
from .shapes import as_shapes

FLOAT32 = 4
BFLOAT16 = 2


@dataclass(frozen=True)
class Cost:
    """One architecture's cost, whatever it is trained on; training/memory.py says what a machine makes of it."""

    parameters: int
    fixed: int  # values of the sin-cos position table, which some papers count as parameters
    flops_forward: int  # per image
    flops_attention: int  # of them, the products of queries, keys and values
    block_input_values: int  # per image and block: all that a recomputed block keeps
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


def account(config: DiTConfig) -> Cost:
    with as_shapes():
        network = DiT(config)
    parameters = sum(p.numel() for p in network.parameters())
    return Cost(
        parameters=parameters,
        fixed=network.patches.positions.numel() if config.positions == "sincos" else 0,
        flops_forward=flops_forward(config),
        flops_attention=flops_attention(config),
        block_input_values=config.image_tokens * config.width,
        block_values=block_values(config),
        other_values=other_values(config),
        depth=config.depth,
    )


def flops_attention(config: DiTConfig) -> int:
    """Of `flops_forward`, what queries, keys and values cost with each other, in all blocks."""
    keys = config.image_tokens + (config.text_length or 0 if config.condition == "tokens" else 0)
    return 2 * config.depth * 2 * config.image_tokens * keys * config.width


def flops_forward(config: DiTConfig) -> int:
    """Floating-point operations of one forward pass for one image: two per multiply-add."""
    n, d, length = config.image_tokens, config.width, config.text_length or 0
    text = config.text_width or 0
    products = n * config.latent[0] * config.patch**2 * d  # patches
    products += TIME_FREQUENCIES * d + d * d  # time
    if config.condition == "pooled":
        products += text * d + d * d
    elif config.condition == "tokens":
        products += length * (text * d + d * d)
    elif config.condition == "words":
        products += length * d
    if config.variant == "adaln-single":
        products += d * 6 * d

    block = 4 * n * d * d + 2 * n * d * config.mlp_width  # attention's maps, MLP
    if config.variant == "adaln":
        block += d * 6 * d
    if config.condition == "tokens":
        block += 2 * n * d * d + 2 * length * d * d
    products += config.depth * block

    if config.variant == "adaln":
        products += d * 2 * d
    products += n * d * config.patch**2 * config.channels_out
    return 2 * products + flops_attention(config)


def block_values(config: DiTConfig) -> int:
    """Values one block keeps for its backward pass, per image."""
    n, d = config.image_tokens, config.width
    attention = 8 * n * d  # input, normed, modulated, q, k, v, answer, projected
    mlp = 4 * n * d + 2 * n * config.mlp_width  # input, normed, modulated, answer; before and after the activation
    modulation = 8 * d  # six vectors and two times 1 + scale
    cross = 3 * n * d + 2 * (config.text_length or 0) * d if config.condition == "tokens" else 0
    return attention + mlp + modulation + cross


def other_values(config: DiTConfig) -> int:
    """Values kept outside the blocks, per image: patches, time and text embedding, head."""
    n, d, length = config.image_tokens, config.width, config.text_length or 0
    values = n * config.latent[0] * config.patch**2 + 3 * n * d + TIME_FREQUENCIES + 6 * d
    if config.condition == "tokens":
        values += length * ((config.text_width or 0) + 3 * d)
    return values
