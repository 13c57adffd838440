"""One network trained by several processes of torchrun, on one machine or several.

    torchrun --standalone --nproc-per-node 4 -m atoll train orders/03.json --out my-expert

Each process computes its rows of every batch, and DistributedDataParallel averages the gradients. The main process
alone measures, saves and prints. A process that torchrun did not start is a group of one, and pays nothing.
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
class Group:
    """The processes that train one network, seen from one of them."""

    rank: int = 0
    size: int = 1

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def rows(self, batch: int) -> slice:
        """This process's rows of a batch. Without any it computes the first row, which counts for nothing (`idle`):

        a process that exchanges no gradients would leave the others waiting.
        """
        rows = slice(self.rank * batch // self.size, (self.rank + 1) * batch // self.size)
        return rows if rows.start < rows.stop else slice(0, 1)

    def idle(self, batch: int) -> bool:
        """Whether a batch has too few rows for this process to get one of its own."""
        return self.rank * batch // self.size == (self.rank + 1) * batch // self.size

    def wrap(self, network: nn.Module) -> nn.Module:
        """The network whose gradients are the mean over the group."""
        return network if self.size == 1 else DistributedDataParallel(network, gradient_as_bucket_view=True)

    def no_exchange(self, network: nn.Module) -> AbstractContextManager[None]:
        """For all but the last micro-batch of a step: gradients add up here, and are exchanged once."""
        return network.no_sync() if isinstance(network, DistributedDataParallel) else nullcontext()

    def sum(self, value: Tensor) -> Tensor:
        """The sum over the group, in every process."""
        if self.size > 1:
            distributed.all_reduce(value)
        return value

    def any(self, here: bool) -> bool:
        """Whether it is so in any process."""
        device = "cuda" if self.size > 1 and distributed.get_backend() == "nccl" else "cpu"
        return bool(self.sum(torch.tensor(float(here), device=device)) > 0)

    def broadcast(self, value: T) -> T:
        """The main process's value, in every process."""
        box = [value]
        if self.size > 1:
            distributed.broadcast_object_list(box)
        return box[0]

    def wait(self) -> None:
        """Until every process is here."""
        if self.size > 1:
            distributed.barrier()


def world_size() -> int:
    """How many processes train together; known before they are connected."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_main() -> bool:
    """Whether this is the main process; known before they are connected."""
    return os.environ.get("RANK", "0") == "0"


def local_device(name: str) -> str:
    """The device of this process: under torchrun `cuda` means the GPU with its local number."""
    local = os.environ.get("LOCAL_RANK")
    return f"cuda:{local}" if name == "cuda" and local is not None else name


@contextmanager
def process_group(device: torch.device) -> Iterator[Group]:
    """The group of this process, connected while inside."""
    if world_size() == 1:
        yield Group()
        return
    distributed.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        yield Group(distributed.get_rank(), distributed.get_world_size())
        distributed.barrier()  # a process that left early would cut the others off
    finally:
        gc.collect()  # the wrapped network holds on to the group, whose threads must end before the interpreter does
        distributed.destroy_process_group()
