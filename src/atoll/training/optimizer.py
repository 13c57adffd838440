"""AdamW, set up one way for every loop, its step guarded on the device.

Both storages of the moments take the same two scalars before a step, as torch's fused AdamW does for loss scaling:
`grad_scale` divides the gradients (that is how they are clipped, in the pass that reads them anyway), and
`found_inf` = 1 makes the step change nothing, weights, moments and step count alike. Neither is read by the host.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from .execution import Execution
from .recipe import Training

EPS = 1e-8
MOMENTS = ("exp_avg", "exp_avg_sq")  # torch's names for the first and the second
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
    """torch's fused AdamW; `rate` is a scalar on the device, so that a replayed graph sees it change.

    Apple's fused kernels take no notice of the two scalars (torch 2.11), so there, with `fused` False, the host does.
    """

    grad_scale: Tensor
    found_inf: Tensor

    def __init__(
        self, groups: list[dict[str, Any]], betas: tuple[float, float], rate: Tensor, fused: bool | None = None
    ) -> None:
        self._fused = rate.device.type != "mps" if fused is None else fused
        graphs = rate.device.type == "cuda"
        super().__init__(groups, lr=rate, betas=betas, eps=EPS, fused=self._fused, capturable=graphs)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter] = {
                    "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None, "the loop computes gradients itself"
        if not self._fused:
            # torch refuses the scalars where it does not use them, so they are taken away
            scale, skip = self.__dict__.pop("grad_scale"), self.__dict__.pop("found_inf")
            if bool(skip > 0):
                return
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        parameter.grad.div_(scale)
        super().step()

    def moments(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """The state of one parameter, by torch's names."""
        return dict(self.state[parameter])

    def restore_moments(self, parameter: nn.Parameter, saved: dict[str, Tensor]) -> None:
        """Take over a saved state of either storage."""
        for name, value in self.state[parameter].items():
            value.copy_(moment_in_float32(saved, name).view_as(value))


class GuardedAdamW8bit(torch.optim.Optimizer):
    """AdamW whose moments are stored in eight bits, each block of 256 with a scale of its own (Dettmers et al.).

    What the codes mean and how numbers are rounded to them is torchao's; the update is ours, since torchao's has no
    guard. Parameters too small to be worth it, and those that are not whole blocks, keep float32 moments.
    """

    grad_scale: Tensor
    found_inf: Tensor

    def __init__(self, groups: list[dict[str, Any]], betas: tuple[float, float], rate: Tensor) -> None:
        super().__init__(groups, {"lr": rate, "betas": betas})
        plain = [{**group, "params": [p for p in group["params"] if not quantisable(p)]} for group in groups]
        self._plain = GuardedAdamW([group for group in plain if group["params"]], betas, rate)
        self._count = torch.zeros((), dtype=torch.float32, device=rate.device)
        self._meanings = {name: meaning_of_codes(name).to(rate.device) for name in MOMENTS}
        for group in self.param_groups:
            for parameter in filter(quantisable, group["params"]):
                self.state[parameter] = {name: Quantised.zeros(parameter) for name in MOMENTS}

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None, "the loop computes gradients itself"
        self._plain.found_inf, self._plain.grad_scale = self.found_inf, self.grad_scale
        self._plain.step()
        self._count += 1.0 - self.found_inf
        update = compiled_update() if self._count.device.type == "cuda" else guarded_update
        for group in self.param_groups:
            for parameter in filter(quantisable, group["params"]):
                if parameter.grad is None:
                    continue  # as torch's AdamW does
                first, second = (self.state[parameter][name] for name in MOMENTS)
                update(
                    parameter.detach().view(-1, BLOCK),
                    parameter.grad.view(-1, BLOCK),
                    first.codes,
                    first.scale,
                    second.codes,
                    second.scale,
                    self._meanings["exp_avg"],
                    self._meanings["exp_avg_sq"],
                    self._count,
                    group["lr"],
                    self.grad_scale,
                    self.found_inf,
                    group["betas"],
                    group["weight_decay"],
                )

    def moments(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """The state of one parameter as it is stored: codes, scales and the number each code stands for."""
        if not quantisable(parameter):
            return self._plain.moments(parameter)
        stored = {"step": self._count}
        for name in MOMENTS:
            moment = self.state[parameter][name]
            stored |= {
                f"{name}.codes": moment.codes,
                f"{name}.scale": moment.scale,
                f"{name}.map": self._meanings[name],
            }
        return stored

    @torch.no_grad()
    def restore_moments(self, parameter: nn.Parameter, saved: dict[str, Tensor]) -> None:
        """Take over a saved state of either storage."""
        if not quantisable(parameter):
            self._plain.restore_moments(parameter, saved)
            return
        self._count.copy_(saved["step"])
        for name in MOMENTS:
            moment = self.state[parameter][name]
            if f"{name}.codes" in saved:
                moment.codes.copy_(saved[f"{name}.codes"])
                moment.scale.copy_(saved[f"{name}.scale"])
            else:
                values = saved[name].to(moment.codes.device).view(-1, BLOCK)
                codes, scale = quantised(values, self._meanings[name])
                moment.codes.copy_(codes)
                moment.scale.copy_(scale)


@dataclass(frozen=True)
class Quantised:
    """A moment in eight bits: codes uint8 [blocks, 256] and scale float32 [blocks]."""

    codes: Tensor
    scale: Tensor

    @staticmethod
    def zeros(parameter: nn.Parameter) -> Quantised:
        blocks = parameter.numel() // BLOCK
        codes = torch.zeros(blocks, BLOCK, dtype=torch.uint8, device=parameter.device)
        return Quantised(codes, torch.zeros(blocks, device=parameter.device))


def quantisable(parameter: Tensor) -> bool:
    return parameter.numel() >= SMALLEST_QUANTISED and parameter.numel() % BLOCK == 0


@cache
def meaning_of_codes(moment: str) -> Tensor:
    """The number in [-1, 1] that each code stands for, float32 [256]: fine near zero; second moments have no sign."""
    from torchao.optim.quant_utils import create_dynamic_map

    return torch.tensor(create_dynamic_map(signed=moment == "exp_avg"))


def quantised(values: Tensor, meaning: Tensor) -> tuple[Tensor, Tensor]:
    """Codes uint8 [blocks, 256] and scales [blocks] nearest to values [blocks, 256]."""
    from torchao.optim.quant_utils import quantize_8bit_with_qmap, scale_tensor

    scaled, scale = scale_tensor(values, BLOCK)
    return quantize_8bit_with_qmap(scaled, meaning), scale


def restored(codes: Tensor, scale: Tensor, meaning: Tensor) -> Tensor:
    """What quantised values stand for, float32 [blocks, 256]; needs no torchao, so that any machine can go on."""
    return meaning[codes.int()] * scale[:, None]


def moment_in_float32(saved: dict[str, Tensor], name: str) -> Tensor:
    """A saved moment, whichever way it was stored."""
    if name in saved:
        return saved[name]
    return restored(*(saved[f"{name}.{part}"] for part in ("codes", "scale", "map")))


@cache
def compiled_update() -> Callable[..., None]:
    """One kernel for parameters of any number of blocks."""
    compiled: Callable[..., None] = torch.compile(guarded_update, fullgraph=True, dynamic=True)
    return compiled


def guarded_update(
    weight: Tensor,
    gradient: Tensor,
    first_codes: Tensor,
    first_scale: Tensor,
    second_codes: Tensor,
    second_scale: Tensor,
    first_meaning: Tensor,
    second_meaning: Tensor,
    count: Tensor,
    rate: Tensor,
    grad_scale: Tensor,
    found_inf: Tensor,
    betas: tuple[float, float],
    weight_decay: float,
) -> None:
    """AdamW's update (Loshchilov and Hutter, algorithm 2) of one tensor in blocks [blocks, 256], or none at all:

    m <- m + (1 - b1) (g - m),  v <- v + (1 - b2) (g^2 - v),
    w <- w - rate (decay w + m / (1 - b1^n) / (sqrt(v / (1 - b2^n)) + eps)).
    """
    skip = found_inf > 0
    gradient = gradient / grad_scale
    m = torch.lerp(restored(first_codes, first_scale, first_meaning), gradient, 1.0 - betas[0])
    v = torch.lerp(restored(second_codes, second_scale, second_meaning), gradient * gradient, 1.0 - betas[1])
    root = (v / (1.0 - betas[1] ** count)).sqrt() + EPS
    step = weight_decay * weight + m / (1.0 - betas[0] ** count) / root
    weight.copy_(torch.where(skip, weight, weight - rate * step))
    for codes, scale, moment, meaning in (
        (first_codes, first_scale, m, first_meaning),
        (second_codes, second_scale, v, second_meaning),
    ):
        new_codes, new_scale = quantised(moment, meaning)
        codes.copy_(torch.where(skip, codes, new_codes))
        scale.copy_(torch.where(skip, scale, new_scale))
