"""Are the kernels right on this GPU? One block computes with and without them before a network uses them.

They were tested on one kind of GPU with one version of Triton. Elsewhere a wrong kernel would not crash: it would train
a worse expert. So a block with random weights is run in bfloat16 with the kernels and with the plain formulas, and both
are compared with the plain formulas in float32: outputs, with and without gradients, and all gradients.
"""

from __future__ import annotations

import copy
import math
from functools import lru_cache

import torch
from torch import Tensor, nn

from .. import kernels
from .dit import Block, DiTConfig

ROWS = 4
SLACK = 3.0, 0.02  # allowed error: three times that of the plain formulas, and 2 % of a tensor's norm


def use_kernels(network: nn.Module) -> str | None:
    """Turn the kernels of a network on a GPU on; where they are wrong, leave them off and return a line about it."""
    block = next((module for module in network.modules() if isinstance(module, Block)), None)
    device = next(network.parameters()).device
    if block is None or not kernels.available(torch.empty(0, device=device, dtype=torch.bfloat16)):
        return None
    tokens = block.config.image_tokens + hasattr(network, "class_token")
    wrong = wrong_kernels(block.config, tokens, device)
    if wrong is None:
        fuse(network)
    return wrong


def fuse(network: nn.Module, on: bool = True) -> None:
    """Turn the kernels of a network on or off, without a check."""
    for module in network.modules():
        if hasattr(module, "fused"):
            module.fused = on  # type: ignore[assignment]


@lru_cache
def wrong_kernels(
    config: DiTConfig, tokens: int, device: torch.device, dtype: torch.dtype = torch.bfloat16
) -> str | None:
    """A line about the tensor that is furthest off, or None: for blocks of this architecture and number of tokens."""
    numbers = torch.Generator().manual_seed(0)
    block = Block(config)
    with torch.no_grad():  # fresh blocks have gates of zero, behind which anything is right
        for parameter in block.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=numbers) / math.sqrt(config.width))
    inputs = block_inputs(config, tokens, device, numbers)
    precise, half = block.to(device), copy.deepcopy(block).to(device, dtype)
    rounded = [x if x is None or x.dtype == torch.bool else x.to(dtype) for x in inputs]
    try:
        truth, plain = results(precise, inputs), results(half, rounded)
        fuse(half)
        ours = results(half, rounded)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # noqa: BLE001, whatever keeps a kernel from running, a network can do without it
        return f"the fused kernels do not run on this GPU ({type(error).__name__}): computing without them, slower"
    off = {name: (relative(ours[name], true), relative(plain[name], true)) for name, true in truth.items()}
    wrong = {name: mine for name, (mine, usual) in off.items() if not mine <= SLACK[0] * usual + SLACK[1]}  # or NaN
    if not wrong:
        return None
    worst = max(wrong, key=lambda name: -1.0 if math.isnan(wrong[name]) else wrong[name])
    return f"the fused kernels are {wrong[worst]:.0%} off on this GPU in {worst}: computing without them, slower"


def block_inputs(config: DiTConfig, tokens: int, device: torch.device, numbers: torch.Generator) -> list[Tensor | None]:
    """Random (h, signal, text, mask) of a block, as its forward takes them."""
    h = torch.randn(ROWS, tokens, config.width, generator=numbers)
    single = config.variant == "adaln-single"
    signal = torch.randn(*([6] if single else []), ROWS, config.width, generator=numbers)
    text = mask = None
    if config.condition == "tokens":
        assert config.text_length is not None
        text = torch.randn(ROWS, config.text_length, config.width, generator=numbers)
        lengths = torch.randint(1, config.text_length + 1, (ROWS, 1), generator=numbers)
        mask = (torch.arange(config.text_length) < lengths)[:, None, None]
    return [None if x is None else x.to(device) for x in (h, signal, text, mask)]


def results(block: nn.Module, inputs: list[Tensor | None]) -> dict[str, Tensor]:
    """What a block adds to its tokens, and the gradients of its weights and tokens for a fixed random pull; float32."""
    h = inputs[0]
    assert h is not None
    h = h.detach().requires_grad_()
    with torch.no_grad():
        sampled = block(h, *inputs[1:]) - h
    output = block(h, *inputs[1:])
    pull = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).to(output)
    names, parameters = zip(*block.named_parameters(), strict=True)
    gradients = torch.autograd.grad(output, (h, *parameters), pull)
    named = zip(("the tokens", *names), gradients, strict=True)
    found = {"the output": output.detach() - h.detach(), "the output without gradients": sampled}
    found |= {f"the gradient of {name}": gradient for name, gradient in named}
    return {name: value.float() for name, value in found.items()}


def relative(value: Tensor, true: Tensor) -> float:
    error: float = (value - true).norm().item() / max(true.norm().item(), 1e-12)
    return error
