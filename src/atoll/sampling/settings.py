"""How to sample, in one object: the Python calls, the command line, evaluation and samples.json all use it.

A new option is a field here, and its use. The command line takes names, defaults and help from the fields.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor

from ..artifacts import UserError
from ..process import GuidanceWeights, Schedule
from .grids import GRIDS, parse_grid
from .solvers import SOLVERS

Precision = Literal["auto", "float32", "bfloat16"]


def option(default: Any, help: str) -> Any:
    """A field with what the command line says of it."""
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Every choice that makes other images of the same model, prompts and seeds.

    `route` is a name, or None for the model's own; the ensemble knows which names there are. `route_every` counts times
    of the grid: the router is asked where a time is the first of n, at every stage a solver has there.
    """

    steps: int = option(50, "Solver steps")
    solver: str = option("dpmpp_2m", ", ".join(SOLVERS))
    grid: str = option("uniform", f"Time grid: {GRIDS}")
    guidance: float = option(2.0, "Classifier-free guidance; 1 is none")
    guidance_interval: tuple[float, float] | None = option(
        None, "Guide only where LOW <= t <= HIGH (t = 1 is noise), such as 0.1 0.9; default: everywhere"
    )
    guidance_weights: GuidanceWeights = option(
        "own", "Experts of the unconditional half: own (exact), or those of the conditional one (cheaper)"
    )
    route: str | None = option(
        None, "Experts to run: top-K, full, threshold-P, nucleus-P, sampled, fixed; default: the ensemble's own"
    )
    route_every: int = option(1, "Ask the router at every n-th step only")
    precision: Precision = option(
        "auto", "Of the networks: float32, bfloat16, or auto: bfloat16 on a CUDA card, float32 elsewhere"
    )
    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}  # in a file, a name that means nothing is wrong

    def __post_init__(self) -> None:
        """Refuse what cannot be, one line each: the option, its value, and what to use instead."""
        self._check("steps", _is_count(self.steps), "use a whole number of at least 1")
        self._check("solver", self.solver in SOLVERS, f"not known; use one of {', '.join(SOLVERS)}")
        self._check("grid", _is_grid(self.grid), f"not known; use {GRIDS}")
        self._check("guidance", _is_finite(self.guidance), "use a number, 1 for none")
        self._check(
            "guidance_interval",
            self.guidance_interval is None or _is_interval(self.guidance_interval),
            "use two times with 0 <= low < high <= 1, such as 0.1 0.9",
        )
        self._check("guidance_weights", self.guidance_weights in get_args(GuidanceWeights), "use own or conditional")
        self._check("route", self.route is None or isinstance(self.route, str), "use a name, such as top-2")
        self._check("route_every", _is_count(self.route_every), "use a whole number of at least 1")
        self._check("precision", self.precision in get_args(Precision), f"use {', '.join(get_args(Precision))}")
        if self.guidance_interval is not None:
            object.__setattr__(self, "guidance_interval", tuple(self.guidance_interval))  # a list, from a file

    def _check(self, name: str, right: bool, fix: str) -> None:
        if not right:
            raise UserError(f"{flag(name)} {shown(getattr(self, name))}: {fix}")

    def times(self, schedule: Schedule) -> Tensor:
        """The grid: steps + 1 falling times from 1 to 0, float64 on the CPU."""
        return parse_grid(self.grid)(self.steps, schedule)

    def precision_on(self, device: torch.device | str) -> torch.dtype:
        """What networks compute in on this device."""
        if self.precision != "auto":
            return torch.bfloat16 if self.precision == "bfloat16" else torch.float32
        return torch.bfloat16 if torch.device(device).type == "cuda" else torch.float32


def flag(name: str) -> str:
    """The option of a field on the command line: `--route-every`."""
    return f"--{name.replace('_', '-')}"


def shown(value: object) -> str:
    """A value as one would type it."""
    return " ".join(map(str, value)) if isinstance(value, tuple | list) else str(value)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_interval(value: object) -> bool:
    return (
        isinstance(value, tuple | list)
        and len(value) == 2
        and all(_is_finite(end) for end in value)
        and 0.0 <= value[0] < value[1] <= 1.0
    )


def _is_grid(name: object) -> bool:
    if not isinstance(name, str):
        return False
    try:
        parse_grid(name)
    except ValueError:
        return False
    return True
