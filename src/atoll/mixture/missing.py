"""Sampling without some of the experts: the others are weighted up.

The velocity of a data set without clusters M is the mixture over the others, with

    p(k | x, t, c, k not in M) = p(k | x, t, c) / sum of p(j | x, t, c) over j not in M.        (1)

So the model without an expert is the model of the data without its cluster, and not a worse guess at the whole.
Equation (1) comes before the route, so that `top-2` still means two experts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..artifacts import AtollWarning
from ..diffusion import Condition


class ExpertsMissing(AtollWarning):
    """A model was loaded without some of its experts."""


def without_missing(weights: Tensor, present: Tensor) -> Tensor:
    """Equation (1): weights [B, K] over the experts of which `present`, bool [K], is True for at least one.

    Where the missing ones had all of the weight, or all but what the dtype cannot divide by, the others get equal
    weights.
    """
    kept = weights * present
    total = kept.sum(dim=1, keepdim=True)
    equal = (present.to(weights.dtype) / present.sum()).expand_as(weights)
    return torch.where(total >= torch.finfo(weights.dtype).tiny, kept / total, equal)


@dataclass(frozen=True)
class RouterAmong:
    """A router that gives no weight to missing experts. present: bool [K]."""

    router: Callable[[Tensor, Tensor, Condition | None], Tensor]
    present: Tensor

    def __call__(self, x: Tensor, t: Tensor, condition: Condition | None) -> Tensor:
        weights = self.router(x, t, condition)
        return without_missing(weights, self.present.to(weights.device))
