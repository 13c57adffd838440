"""The router as it runs beside experts: in their precision, and on CUDA as graphs like theirs."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import Tensor

from ..process import Condition
from ..router.card import TrainedRouter
from .replay import Replayed
from .residency import Running
from .weights import Precision


@dataclass(frozen=True, eq=False)
class ReplayedRouter:
    """(x, t, condition) -> weights [B, K], float32, rows summing to one."""

    function: Replayed

    def __call__(self, x: Tensor, t: Tensor, condition: Condition | None) -> Tensor:
        return self.function(x, t, condition)


def replayed_router(
    trained: TrainedRouter, precision: Precision, device: torch.device, running: Running
) -> TrainedRouter | ReplayedRouter:
    """The router on a device; in float32 on a CPU it is the trained one as it is."""
    graphs = device.type == "cuda" if running.graphs is None else running.graphs
    network = trained.network
    if precision == "bfloat16" or network.class_token.device != device:
        dtype = torch.bfloat16 if precision == "bfloat16" else torch.float32
        network = copy.deepcopy(network).to(device, dtype)
    placed = TrainedRouter(trained.card, network, trained.digest)
    if not graphs:
        return placed
    return ReplayedRouter(
        Replayed(placed, device, shapes=running.shapes, record=device.type == "cuda", kernels=running.kernels)
    )
