"""The world whose answers are known reads a condition as networks do."""

from __future__ import annotations

import torch

from atoll.diffusion import Condition, LinearFlow
from gaussian_world import WORLD, states


def test_no_label_is_no_condition() -> None:
    x, t = states(2, [0.3, 0.7])
    given = Condition(labels=torch.tensor([0, -1, 1, -1]))
    conditional, unconditional = (WORLD.posterior(x, t, LinearFlow(), c) for c in (given, None))
    same = torch.isclose(conditional.x0, unconditional.x0, rtol=1e-12).all(1)
    assert same.tolist() == [False, True, False, True]
