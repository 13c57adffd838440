"""Products of 8-bit numbers in training, by torchao: twice bfloat16's rate on GPUs that have them.

Only maps whose products are long enough to pay for the rounding: queries, keys and values together, and the MLP's two.
Each row has its own scale; the gradients of weights, which sum over all tokens, stay in bfloat16. Weights keep their
names and their float32.
"""

from __future__ import annotations

from dataclasses import replace

from torch import nn

LONG = ("attention.qkv", "mlp.enter", "mlp.leave")  # of a block
STEP = 16  # 8-bit matrices have multiples of it in rows and columns


def to_float8(network: nn.Module, *, emulate: bool = False) -> None:
    """Let the long linear maps of a network's blocks multiply in 8 bits; `emulate` them where the device cannot."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = replace(Float8LinearConfig.from_recipe_name("rowwise_with_gw_hp"), emulate=emulate)

    def long(module: nn.Module, name: str) -> bool:
        fits = isinstance(module, nn.Linear) and module.in_features % STEP == module.out_features % STEP == 0
        return fits and name in LONG

    for block in network.blocks:  # type: ignore[union-attr]
        convert_to_float8_training(block, config=config, module_filter_fn=long)
