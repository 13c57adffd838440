"""The router as it runs beside experts: in their precision, and on CUDA as graphs like theirs."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import Tensor

from ..diffusion import Condition
from ..models.kernel_check import use_kernels
from ..router.card import TrainedRouter
from .graphs import GraphRunner
from .padding import padded_rows
from .residency import Running
from .weights import Precision


@dataclass(frozen=True, eq=False)
class PlacedRouter:
    """(x, t, condition) -> weights [B, K], float32, rows summing to one."""

    trained: TrainedRouter
    graphs: GraphRunner | None  # on CUDA

    def __call__(self, x: Tensor, t: Tensor, condition: Condition | None) -> Tensor:
        if self.graphs is not None:
            return self.graphs(x, t, condition)
        return self.trained(*padded_rows(x, t, condition))[: len(x)]


def place_router(trained: TrainedRouter, precision: Precision, device: torch.device, running: Running) -> PlacedRouter:
    """The router on a device; in float32 on a CPU it is the trained one as it is."""
    network = trained.network
    if precision == "bfloat16" or next(network.parameters()).device != device:
        dtype = torch.bfloat16 if precision == "bfloat16" else torch.float32
        network = copy.deepcopy(network).to(device)
        for name, part in network.named_children():
            if name != "head":  # logits stay float32: rounded to bfloat16, near ties would go to another expert
                part.to(dtype)
        use_kernels(network)
    placed = TrainedRouter(trained.card, network, trained.digest)
    cuda = device.type == "cuda"
    if not (cuda if running.graphs is None else running.graphs):
        return PlacedRouter(placed, None)
    runner = GraphRunner(placed, device, shapes=running.shapes, record=cuda)
    return PlacedRouter(placed, runner)
