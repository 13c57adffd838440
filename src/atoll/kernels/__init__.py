"""The backbone's memory-bound steps, each as one pass over the tokens (Triton, CUDA only).

dit.py holds the plain formulas. They are the reference, and the path on every device but CUDA: `available` decides.
All arithmetic here is float32, whatever the tensors are. No kernel has atomics: equal inputs, equal bits.
"""

from .attention import ATTENTION_TILES, AttentionTile, attends, cross_attention, fits, self_attention
from .block import fused_block
from .epilogue import ends_in_gelu, linear_gelu
from .launch import Switch, available
from .tokens import TILES, Tile, add_norm_modulate, gated_add, gelu_backward, keep_and_norm, norm_modulate

__all__ = [
    "ATTENTION_TILES",
    "TILES",
    "AttentionTile",
    "Switch",
    "Tile",
    "add_norm_modulate",
    "attends",
    "available",
    "cross_attention",
    "ends_in_gelu",
    "fits",
    "fused_block",
    "gated_add",
    "gelu_backward",
    "keep_and_norm",
    "linear_gelu",
    "norm_modulate",
    "self_attention",
]
