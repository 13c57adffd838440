"""Painting without some of the experts: their weight is shared out among those who are there.

What a data set without clusters M looks like is known exactly: its velocity is the mixture over the others, with

    p(k | x, t, c, k not in M) = p(k | x, t, c) / sum of p(j | x, t, c) over j not in M.        (1)

So the model without an expert is the model of the data without its cluster, and not a worse guess at the whole.
The weights are shared out before the route, so that `top-2` still means two experts.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

import torch
from torch import Tensor

from ..artifacts import AtollWarning, UserError
from ..process import Condition, Kind, Prediction, Schedule


class ExpertsMissing(AtollWarning):
    """A model was loaded without some of its experts."""


def shared_out(weights: Tensor, present: Tensor) -> Tensor:
    """Equation (1): weights [B, K] with those of missing experts dealt to the others. present: bool [K], not all False.

    Where the missing ones had all of it, or all but what the dtype cannot divide by, nothing tells the others apart:
    they share equally.
    """
    kept = weights * present
    total = kept.sum(dim=1, keepdim=True)
    equal = (present.to(weights.dtype) / present.sum()).expand_as(weights)
    return torch.where(total >= torch.finfo(weights.dtype).tiny, kept / total, equal)


@dataclass(frozen=True)
class RouterAmong:
    """A router that gives all of its weight to experts that are there."""

    router: Callable[[Tensor, Tensor, Condition | None], Tensor]
    missing: Collection[int]

    def __call__(self, x: Tensor, t: Tensor, condition: Condition | None) -> Tensor:
        weights = self.router(x, t, condition)
        present = torch.tensor([k not in self.missing for k in range(weights.shape[1])], device=weights.device)
        return shared_out(weights, present)


@dataclass(frozen=True)
class MissingExpert:
    """Stands in the place of an expert that is not there. No route that follows the router asks it anything."""

    cluster: int
    schedule: Schedule
    kind: Kind = Kind.VELOCITY

    def __call__(self, x: Tensor, t: Tensor, condition: Condition | None) -> Prediction:
        raise UserError(f"cluster {self.cluster}: has no expert, and this route asks for it; use another route")
