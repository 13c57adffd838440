"""What a training may use of this machine, and the execution that follows from it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from pydantic import ValidationError

from ..artifacts import UserError, explain
from ..models.accounting import Cost
from .execution import Execution, named_or_best, open_device
from .machines import stay_within, this_gpu
from .memory import HOST_ACTIVATIONS, fits, plain_execution
from .recipe import Training
from .team import placed_on, team_size


@dataclass(frozen=True)
class Resources:
    """What the user asks for; whatever is None or not there is chosen, or stays as it was."""

    device: str | None = None
    memory: float | None = None  # GiB of a GPU's memory to stay within; None: what is free
    settings: Mapping[str, Any] = field(default_factory=dict)  # fields of Execution that are insisted on

    @property
    def wanted_device(self) -> str | None:
        """By --device, or by --set device=...; None: whatever is best."""
        wanted = self.settings.get("device", self.device)
        return None if wanted is None else str(wanted)

    def check(self) -> None:
        """Refuse what cannot be, before anything is written."""
        if self.wanted_device is not None and not usable(self.wanted_device):
            raise UserError(f"--device {self.wanted_device}: this machine has none; use cpu")
        self._insisted(Execution())

    def check_memory_of(self, device: str) -> None:
        if self.memory is not None and kind_of(device) != "cuda":
            raise UserError(f"--memory: means a CUDA card's memory, and {device} is none; leave it out")

    def choose(
        self,
        cost: Cost,
        training: Training,
        samples: int,
        saved: Execution | None,
        activations: float = HOST_ACTIVATIONS,
    ) -> Choice:
        """The execution for a network of this cost; `samples` is the bytes of its data, `saved` what it had so far.

        `activations` is the bytes that one micro-batch may take of them without a CUDA card.
        """
        wanted = self.wanted_device
        if saved is not None and self.memory is None and wanted in (None, saved.device) and usable(saved.device):
            execution = self._insisted(saved)
            return Choice(execution, said="as before" if execution == saved else "as asked")
        device = named_or_best(wanted or (saved.device if saved is not None and usable(saved.device) else None))
        kind = kind_of(device)
        if kind == "cuda" and usable(device):
            return self._best_on(device, cost, training, samples)
        self.check_memory_of(device)
        fresh = plain_execution(cost, training.batch, device, activations)
        before = saved if saved is not None and torch.device(saved.device).type == kind else fresh
        execution = self._insisted(before.model_copy(update={"device": device}))
        return Choice(execution)

    def _best_on(self, device: str, cost: Cost, training: Training, samples: int) -> Choice:
        """The fastest that fits on a CUDA card with what is insisted on; every process of a team has its share."""
        self._insisted(Execution())
        machine = this_gpu(torch.device(placed_on(device)), self.memory)
        processes = team_size()
        rows = -(-training.batch // processes)
        insisted = {name: value for name, value in self.settings.items() if name != "device"}
        found = fits(cost, machine, rows, device=device, samples=samples, insisted=insisted)
        if not found:
            limit = f"--memory {self.memory:g}GB" if self.memory is not None else f"{machine.memory:.1f} GiB free"
            asked = "".join(f" --set {name}={value}" for name, value in insisted.items())
            raise UserError(
                f"{limit}{asked}: nothing makes {cost.parameters / 1e6:,.0f}M weights fit; use a larger card, "
                "a smaller network, fewer settings, or --device cpu"
            )
        said = found[0].sentence(machine.memory, -(-training.images // processes))
        return Choice(found[0].execution, said, self.memory)

    def _insisted(self, execution: Execution) -> Execution:
        try:
            return Execution.model_validate({**execution.model_dump(), **self.settings})
        except ValidationError as error:
            known = ", ".join(Execution.model_fields)
            raise UserError(f"--set: {explain(error)}; what can be set is {known}") from error


@dataclass(frozen=True)
class Choice:
    """An execution, and why it was taken."""

    execution: Execution
    said: str | None = None
    limit: float | None = None  # GiB of a card that the user set; None: what is free

    def open_device(self) -> torch.device:
        """The device, ready to use, and its memory no larger than the limit."""
        device = open_device(self.execution)
        if device.type == "cuda":
            stay_within(device, self.limit)
        return device


def kind_of(device: str) -> str:
    """`cuda` of `cuda:1`."""
    try:
        return torch.device(device).type
    except RuntimeError as error:
        raise UserError(f"--device {device}: no such kind of device; use cpu, cuda, cuda:1 or mps") from error


def usable(device: str) -> bool:
    """Whether this machine has such a device."""
    kind = kind_of(device)
    if kind == "cuda":
        return torch.cuda.is_available() and (torch.device(placed_on(device)).index or 0) < torch.cuda.device_count()
    return kind == "cpu" or (kind == "mps" and torch.backends.mps.is_available())


def parse_memory(text: str) -> float:
    """`24GB`, `24 GiB`, `24` or `12.5g` -> GiB. Makers' gigabytes of card memory are GiB, so both mean the same."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(?:gi?b?)?\s*", text, re.IGNORECASE)
    if found is None or float(found[1]) <= 0:
        raise UserError(f"--memory {text}: write it in gigabytes, such as 24GB")
    return float(found[1])
