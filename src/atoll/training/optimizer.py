"""AdamW, set up one way for every loop, its step guarded on the device.

Both storages of the moments take the same two scalars before a step, as torch's fused AdamW does for loss scaling:
`grad_scale` divides the gradients (that is how they are clipped, in the pass that reads them anyway), and
`found_inf` = 1 makes the step change nothing, weights, moments and step count alike. Neither is read by the host.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from .execution import Execution
from .recipe import Training

EPS = 1e-8
BLOCK = 256  # values of a moment that share one scale, as in torchao
SMALLEST_QUANTISED = 4096  # values; smaller tensors weigh nothing, and biases are worth their precision


def adamw(module: nn.Module, training: Training, execution: Execution) -> GuardedAdamW | GuardedAdamW8bit:
    """AdamW; only matrices decay, not biases, norms or embeddings of one dimension. All memory is taken here."""
    trained = [p for p in module.parameters() if p.requires_grad]
    kinds = ([p for p in trained if p.ndim >= 2], training.weight_decay), ([p for p in trained if p.ndim < 2], 0.0)
    groups = [{"params": members, "weight_decay": decay} for members, decay in kinds if members]
    family = GuardedAdamW8bit if execution.moments == "8-bit" else GuardedAdamW
    return family(groups, training.betas, torch.zeros((), device=trained[0].device))


class GuardedAdamW(torch.optim.AdamW):
    """torch's fused AdamW; `rate` is a scalar on the device, so that a replayed graph sees it change."""

    grad_scale: Tensor
    found_inf: Tensor

    def __init__(self, groups: list[dict[str, Any]], betas: tuple[float, float], rate: Tensor) -> None:
        graphs = rate.device.type == "cuda"
        super().__init__(groups, lr=rate, betas=betas, eps=EPS, fused=True, capturable=graphs)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter] = {
                    "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }

    def moments(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """The state of one parameter, by torch's names."""
        return dict(self.state[parameter])

    def restore_moments(self, parameter: nn.Parameter, saved: dict[str, Tensor]) -> None:
        """Take over a saved state of either storage."""
        for name, value in self.state[parameter].items():
            value.copy_(moment_in_float32(saved, name))


class GuardedAdamW8bit(torch.optim.Optimizer):
    """AdamW whose moments are stored in eight bits, each block of 256 with a scale of its own (Dettmers et al.).

    The storage and its rounding are torchao's; the update is ours, since torchao's has no guard. One step count serves
    all parameters.
    """

    grad_scale: Tensor
    found_inf: Tensor

    def __init__(self, groups: list[dict[str, Any]], betas: tuple[float, float], rate: Tensor) -> None:
        super().__init__(groups, {"lr": rate, "betas": betas})
        self.count = torch.zeros((), dtype=torch.float32, device=rate.device)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter] = {
                    "exp_avg": eight_bits(parameter, signed=True),
                    "exp_avg_sq": eight_bits(parameter, signed=False),
                }

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None, "the loop computes gradients itself"
        self.count += 1.0 - self.found_inf
        update = compiled_update() if self.count.device.type == "cuda" else guarded_update
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue  # as torch's AdamW does
                state = self.state[parameter]
                update(
                    parameter.detach(),
                    parameter.grad,
                    state["exp_avg"],
                    state["exp_avg_sq"],
                    self.count,
                    group["lr"],
                    self.grad_scale,
                    self.found_inf,
                    group["betas"],
                    group["weight_decay"],
                )

    def moments(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """The state of one parameter as it is stored: codes, scales and the value each code stands for."""
        stored = {"step": self.count}
        for name, value in self.state[parameter].items():
            if is_quantised(value):
                stored |= {f"{name}.codes": value.codes, f"{name}.scale": value.scale, f"{name}.map": value.qmap}
            else:
                stored[name] = value
        return stored

    def restore_moments(self, parameter: nn.Parameter, saved: dict[str, Tensor]) -> None:
        self.count.copy_(saved["step"])
        for name, value in self.state[parameter].items():
            if is_quantised(value) and f"{name}.codes" in saved:
                value.codes.copy_(saved[f"{name}.codes"])
                value.scale.copy_(saved[f"{name}.scale"])
            else:
                value.copy_(moment_in_float32(saved, name).to(value.device))


def eight_bits(parameter: nn.Parameter, *, signed: bool) -> Tensor:
    """Zeros shaped like a parameter: in eight bits where it is large enough, else in float32."""
    from torchao.optim.subclass_8bit import OptimState8bit

    if parameter.numel() < SMALLEST_QUANTISED or parameter.numel() % BLOCK:
        return torch.zeros_like(parameter, requires_grad=False)
    stored: Tensor = OptimState8bit.zeros(parameter.shape, signed, BLOCK, parameter.device, torch.float32)
    return stored


def is_quantised(moment: Tensor) -> bool:
    return hasattr(moment, "codes")


def as_float(moment: Tensor) -> Tensor:
    return moment.dequantize() if is_quantised(moment) else moment


def moment_in_float32(saved: dict[str, Tensor], name: str) -> Tensor:
    """A saved moment, whichever way it was stored; needs no torchao, so that any machine can go on with it."""
    if name in saved:
        return saved[name]
    codes, scale, meaning = (saved[f"{name}.{part}"] for part in ("codes", "scale", "map"))
    values = meaning[codes.flatten().long()].view(len(scale), -1) * scale[:, None]
    return values.view(codes.shape)


@lru_cache(maxsize=1)
def compiled_update() -> Callable[..., None]:
    """One kernel per shape of parameter; XL/2 has about a dozen shapes."""
    torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)
    compiled: Callable[..., None] = torch.compile(guarded_update, fullgraph=True, dynamic=False)
    return compiled


def guarded_update(
    weight: Tensor,
    gradient: Tensor,
    first: Tensor,
    second: Tensor,
    count: Tensor,
    rate: Tensor,
    grad_scale: Tensor,
    found_inf: Tensor,
    betas: tuple[float, float],
    weight_decay: float,
) -> None:
    """AdamW's update (Loshchilov and Hutter, algorithm 2) of one tensor in float32, or none at all:

    m <- m + (1 - b1) (g - m),  v <- v + (1 - b2) (g^2 - v),
    w <- w - rate (decay w + m / (1 - b1^n) / (sqrt(v / (1 - b2^n)) + eps)).
    """
    skip = found_inf > 0
    gradient = gradient / grad_scale
    m, v = as_float(first), as_float(second)
    new_m = torch.lerp(m, gradient, 1.0 - betas[0])
    new_v = torch.lerp(v, gradient * gradient, 1.0 - betas[1])
    root = (new_v / (1.0 - betas[1] ** count)).sqrt() + EPS
    step = weight_decay * weight + new_m / (1.0 - betas[0] ** count) / root
    weight.copy_(torch.where(skip, weight, weight - rate * step))
    store(first, new_m, skip)
    store(second, new_v, skip)


def store(moment: Any, new: Tensor, skip: Tensor) -> None:
    """Replace a stored moment unless `skip`. Codes and scales are chosen, not values: rounding twice is not once."""
    if not is_quantised(moment):
        moment.copy_(torch.where(skip, moment, new))
        return
    from torchao.optim.quant_utils import quantize_8bit_with_qmap, scale_tensor

    scaled, scale = scale_tensor(new, BLOCK)
    codes = quantize_8bit_with_qmap(scaled, moment.qmap)
    moment.codes.copy_(torch.where(skip, moment.codes, codes))
    moment.scale.copy_(torch.where(skip, moment.scale, scale))
