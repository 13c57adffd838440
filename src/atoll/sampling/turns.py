"""Sampling with more experts than memory: images advance independently, each when its experts have run.

An expert in memory runs for the images that wait for it, while the next one is copied. At top-1 an image hardly ever
changes its expert, so it takes many steps per copy; in lockstep nearly all experts are needed at every step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..process import wide_dtype
from .protocols import Residents
from .requests import Running, Stack, Step

if TYPE_CHECKING:
    from .engine import Engine


def advance_by_turns(engine: Engine, residents: Residents) -> list[Step]:
    """One expert that is in memory, for the images that wait for it, while the next one is copied there."""
    fresh = [running for running in engine.running if running.owed is None]
    for first in range(0, len(fresh), engine.max_images):
        stack = Stack(fresh[first : first + engine.max_images])
        weights = engine.weights(stack, *engine.rows(stack)).tolist()
        for running, branch, rows in stack.branches():
            owed = {(branch, k): w for k, w in enumerate(weights[rows.start]) if w != 0.0}
            running.owed = owed if branch == 0 else {**(running.owed or {}), **owed}
    waiting: dict[int, list[tuple[Running, int]]] = {}
    for running in engine.running:
        for branch, k in running.owed or ():
            waiting.setdefault(k, []).append((running, branch))
    k = residents.next({k: len(rows) for k, rows in waiting.items()})
    served = waiting[k][: engine.max_images]
    for (running, branch), part in zip(served, part_of_sum(engine, served, k), strict=True):
        assert running.owed is not None
        del running.owed[branch, k]
        running.had[branch, k] = part
    answered = [running for running in dict.fromkeys(running for running, _ in served) if not running.owed]
    if not answered:
        return []
    stack = Stack(answered)
    scales = [running.sampling.guidance for running in stack.guided]
    engine.stacked = None, None, torch.tensor(scales, dtype=torch.float32).to(engine.device)
    sums = [sum_of_parts(running, branch) for running, branch, _ in stack.branches()]
    for running in answered:
        running.owed, running.had = None, {}
    return engine.send(stack, torch.cat(sums))


def part_of_sum(engine: Engine, served: Sequence[tuple[Running, int]], k: int) -> Sequence[Tensor]:
    """Expert k's weighted velocity of some (image, branch), each [1, ...]."""
    x = torch.cat([running.x for running, _ in served])
    t = torch.tensor([running.t for running, _ in served], dtype=wide_dtype(x.device)).to(x.device)
    places = torch.tensor([running.place + branch for running, branch in served]).to(x.device)
    condition = None if engine.table is None else engine.table[places]
    chosen = served[0][0].chosen
    assert chosen is not None
    weights = torch.zeros(len(served), chosen.shape[1], dtype=chosen.dtype)
    weights[:, k] = torch.tensor([running.owed[branch, k] for running, branch in served])  # type: ignore[index]
    velocity = engine.model.velocity(x, t, condition, weights.to(x.device))
    return list(velocity.split(1))


def sum_of_parts(running: Running, branch: int) -> Tensor:
    """The velocity of one image and branch, summed in the order of experts as in lockstep."""
    parts = [running.had[key] for key in sorted(running.had) if key[0] == branch]
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total
