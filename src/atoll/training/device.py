"""Where and in which precision to compute."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch

from ..artifacts import UserError
from .plan import Training


def named_or_best(name: str | None) -> str:
    """The device a user names; for who names none, cuda if there is one."""
    return name or ("cuda" if torch.cuda.is_available() else "cpu")


def open_device(name: str | None, plan: Training) -> torch.device:
    """The device a user names, or the best; on a CPU the plan's thread count is set."""
    try:
        device = torch.device(named_or_best(name))
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"--device {name}: not usable here ({str(error).splitlines()[0]}); use cpu") from error
    if device.type == "cpu":
        torch.set_num_threads(plan.threads)
    return device


def autocast(device: torch.device, plan: Training) -> AbstractContextManager[None]:
    """bfloat16 for the network's matrix products, if the plan says so; losses stay in float32."""
    return torch.autocast(device.type, torch.bfloat16, enabled=plan.precision == "bfloat16")
