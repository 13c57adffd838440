"""How to sample, in one object: the Python calls, the command line, evaluation and samples.json all use it.

A new option is a field with its help text, and a line in CHECKS. The command line takes names and defaults from here.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from ..artifacts import UserError
from ..diffusion import Schedule
from .grids import GRIDS, parse_grid
from .solvers import SOLVERS

Precision = Literal["auto", "float32", "bfloat16"]
GuidanceWeights = Literal["own", "conditional"]  # of the experts in the unconditional branch


def option(default: Any, help: str) -> Any:
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Every choice that makes other images of the same model, prompts and seeds.

    `route` is a name, or None for the model's own. `route_every` counts times of the grid: the router runs at the
    first of every n, and in between an image keeps its weights.
    """

    steps: int = option(50, "Solver steps")
    solver: str = option("dpmpp_2m", ", ".join(SOLVERS))
    grid: str = option("uniform", f"Time grid: {GRIDS}")
    guidance: float = option(2.0, "Classifier-free guidance; 1 is none")
    guidance_interval: tuple[float, float] | None = option(
        None, "Guide only where LOW <= t <= HIGH (t = 1 is noise), such as 0.1 0.9; default: everywhere"
    )
    guidance_weights: GuidanceWeights = option(
        "own", "Experts of the unconditional branch: own (exact), or those of the conditional branch (cheaper)"
    )
    route: str | None = option(None, "Experts to run: top-K, full, threshold-P or fixed; default: the ensemble's own")
    route_every: int = option(1, "Run the router at every n-th step only")
    precision: Precision = option(
        "auto", "Of the networks: float32, bfloat16, or auto: bfloat16 on a CUDA GPU, float32 elsewhere"
    )
    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}  # an unknown name in a file is an error

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            valid, fix = CHECKS[each.name]
            if not valid(value):
                shown = " ".join(map(str, value)) if isinstance(value, tuple | list) else str(value)
                raise UserError(f"--{each.name.replace('_', '-')} {shown}: {fix}")
        if self.guidance_interval is not None:
            object.__setattr__(self, "guidance_interval", tuple(self.guidance_interval))  # a list, from a file

    def times(self, schedule: Schedule) -> Tensor:
        """The grid: steps + 1 falling times from 1 to 0, float64 on the CPU."""
        return parse_grid(self.grid)(self.steps, schedule)

    def guides_at(self, t: float) -> bool:
        """Whether the unconditional branch is needed at time t."""
        low, high = self.guidance_interval or (0.0, 1.0)
        return self.guidance != 1.0 and low <= t <= high

    def precision_on(self, device: torch.device | str) -> Literal["float32", "bfloat16"]:
        """What networks compute in on this device."""
        if self.precision != "auto":
            return self.precision
        return "bfloat16" if torch.device(device).type == "cuda" else "float32"


def is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def is_finite(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def is_interval(value: Any) -> bool:
    pair = isinstance(value, tuple | list) and len(value) == 2 and all(map(is_finite, value))
    return value is None or (pair and 0.0 <= value[0] < value[1] <= 1.0)


def is_grid(name: Any) -> bool:
    try:
        return parse_grid(name) is not None
    except (ValueError, TypeError, AttributeError):
        return False


CHECKS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "steps": (is_count, "use a whole number of at least 1"),
    "solver": (lambda v: v in SOLVERS, f"not known; use one of {', '.join(SOLVERS)}"),
    "grid": (is_grid, f"not known; use {GRIDS}"),
    "guidance": (is_finite, "use a number, 1 for none"),
    "guidance_interval": (is_interval, "use two times with 0 <= low < high <= 1, such as 0.1 0.9"),
    "guidance_weights": (lambda v: v in ("own", "conditional"), "use own or conditional"),
    "route": (lambda v: v is None or isinstance(v, str), "use a name, such as top-2"),
    "route_every": (is_count, "use a whole number of at least 1"),
    "precision": (lambda v: v in ("auto", "float32", "bfloat16"), "use auto, float32, bfloat16"),
}
