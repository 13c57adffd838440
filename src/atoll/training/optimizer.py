"""AdamW, set up one way for every training: torch's fused one, or torchao's with moments in 8 bits."""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .compute import ComputeConfig
from .config import TrainConfig

EIGHT_BIT = ("codes", "scale", "qmap")  # of a moment that torchao stores in 8 bits


def adamw(module: nn.Module, training: TrainConfig, compute: ComputeConfig) -> Optimizer:
    """AdamW whose learning rate is one tensor on the device; only matrices decay. Memory for the moments is taken here.

    A replayed CUDA graph reads the learning rate from that tensor, so change it in place (`set_learning_rate`).
    """
    trained = [p for p in module.parameters() if p.requires_grad]
    device = trained[0].device
    kinds = ([p for p in trained if p.ndim >= 2], training.weight_decay), ([p for p in trained if p.ndim < 2], 0.0)
    groups = [{"params": members, "weight_decay": decay} for members, decay in kinds if members]
    rate = torch.zeros((), device=device)
    optimizer: Optimizer
    if compute.moments == "8-bit":
        from torchao.optim import AdamW8bit

        optimizer = AdamW8bit(groups, lr=rate, betas=training.betas)
    else:  # Apple's fused kernels ignore `found_inf` (torch 2.11)
        fused, graphs = device.type != "mps", device.type == "cuda"
        optimizer = torch.optim.AdamW(groups, lr=rate, betas=training.betas, fused=fused, capturable=graphs)
    for parameter in trained:  # a step at learning rate zero makes the moments and changes no weight
        parameter.grad = torch.zeros_like(parameter)
    take_step(optimizer)
    optimizer.zero_grad(set_to_none=True)
    for state in optimizer.state.values():
        state["step"].zero_()
    return optimizer


def set_learning_rate(optimizer: Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"].fill_(rate)


@torch.no_grad()
def guarded_step(optimizer: Optimizer, scale: Tensor, finite: Tensor) -> None:
    """A step with all gradients divided by `scale`; unless `finite` is 1, nothing changes at all.

    torch's fused kernels read both scalars on the device, as for loss scaling; otherwise the host waits for them.
    """
    if optimizer.defaults.get("fused"):
        optimizer.grad_scale, optimizer.found_inf = scale, 1.0 - finite  # type: ignore[attr-defined]
        take_step(optimizer)
    elif bool(finite > 0):
        for group in optimizer.param_groups:
            torch._foreach_div_([p.grad for p in group["params"] if p.grad is not None], scale)
        take_step(optimizer)


def take_step(optimizer: Optimizer) -> None:
    """A step; torchao compiles its own for every shape of weights, which a CPU is not worth."""
    on_cpu = optimizer.param_groups[0]["lr"].device.type == "cpu"
    with torch.compiler.set_stance("force_eager") if on_cpu and not optimizer.defaults.get("fused") else nullcontext():
        optimizer.step()


def moments(optimizer: Optimizer, parameter: nn.Parameter) -> dict[str, Tensor]:
    """`step`, `exp_avg` and `exp_avg_sq` of one parameter; in 8 bits as codes, scales and the number of each code."""
    flat: dict[str, Tensor] = {}
    for name, value in optimizer.state[parameter].items():
        parts = {"": value} if type(value) is Tensor else {f".{part}": getattr(value, part) for part in EIGHT_BIT}
        flat |= {name + part: tensor for part, tensor in parts.items()}
    return flat


@torch.no_grad()
def restore_moments(optimizer: Optimizer, parameter: nn.Parameter, saved: dict[str, Tensor]) -> None:
    """Take over what `moments` gave, from either storage."""
    for name, value in optimizer.state[parameter].items():
        if name in saved:
            value.copy_(saved[name].to(value.device))  # rounds where the storage is of 8 bits
            continue
        codes, scale, qmap = (saved[f"{name}.{part}"] for part in EIGHT_BIT)
        if type(value) is Tensor:
            value.copy_((qmap[codes.int()].view(len(scale), -1) * scale[:, None]).view_as(value))
        else:
            value.codes.copy_(codes)
            value.scale.copy_(scale)
