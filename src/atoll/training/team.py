"""One island on several GPUs: processes started by torchrun that train one network together.

    torchrun --standalone --nproc-per-node 4 -m atoll train orders/03.json --out my-expert

Each takes its part of every batch, gradients are averaged by DistributedDataParallel, and the first process alone
measures, saves and talks. A process that was not started by torchrun is a team of one, and pays nothing.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as distributed
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

T = TypeVar("T")


@dataclass(frozen=True)
class Team:
    """This process's place among those that train one network."""

    rank: int = 0
    size: int = 1

    @property
    def leads(self) -> bool:
        """Whether this process measures, saves and talks."""
        return self.rank == 0

    def part(self, batch: int) -> slice:
        """This process's rows of a batch; all rows of all processes are the batch, once."""
        return slice(self.rank * batch // self.size, (self.rank + 1) * batch // self.size)

    def idle(self, batch: int) -> bool:
        """Whether a batch has too few rows for this process to get one."""
        part = self.part(batch)
        return bool(part.start == part.stop)

    def drawn_part(self, batch: int) -> slice:
        """The rows this process computes on: its part; while idle one row that counts for nothing.

        Who computed nothing would miss the exchange of gradients, and the others would wait for ever.
        """
        return slice(0, 1) if self.idle(batch) else self.part(batch)

    def wrap(self, network: nn.Module) -> nn.Module:
        """The network whose gradients are the mean over the team."""
        if self.size == 1:
            return network
        return DistributedDataParallel(network, gradient_as_bucket_view=True)

    def no_exchange(self, network: nn.Module) -> AbstractContextManager[None]:
        """For all but the last micro-batch of a step: gradients are summed up here and exchanged once."""
        return network.no_sync() if isinstance(network, DistributedDataParallel) else nullcontext()

    def sum(self, value: Tensor) -> Tensor:
        """The sum over the team, on every member."""
        if self.size > 1:
            distributed.all_reduce(value)
        return value

    def any(self, here: bool) -> bool:
        """Whether it is so for anybody in the team."""
        flag = torch.tensor(float(here), device="cuda" if distributed.get_backend() == "nccl" else "cpu")
        return bool(self.sum(flag) > 0)

    def told(self, value: T) -> T:
        """The first process's value, on every member."""
        box = [value]
        if self.size > 1:
            distributed.broadcast_object_list(box)
        return box[0]

    def wait(self) -> None:
        """Until all are here."""
        if self.size > 1:
            distributed.barrier()


def team_size() -> int:
    """How many processes train together; known before the team is gathered."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def leads_its_team() -> bool:
    """Whether this process is the first of its team, or alone; known before the team is gathered."""
    return os.environ.get("RANK", "0") == "0"


def placed_on(device: str) -> str:
    """The device of this process: under torchrun `cuda` means the GPU with its local number."""
    local = os.environ.get("LOCAL_RANK")
    return f"cuda:{local}" if device == "cuda" and local is not None else device


@contextmanager
def gathered(device: torch.device) -> Iterator[Team]:
    """The team this process belongs to, joined while inside."""
    if team_size() == 1:
        yield Team()
        return
    distributed.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        yield Team(distributed.get_rank(), distributed.get_world_size())
        distributed.barrier()  # nobody leaves while others still hear from them
    finally:
        gc.collect()  # what wraps the network holds on to the group; its threads must end before the interpreter does
        distributed.destroy_process_group()
