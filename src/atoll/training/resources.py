"""What a training may use of this machine, and the settings that follow from it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from pydantic import ValidationError

from ..artifacts import UserError, explain
from ..models.accounting import Cost
from .compute import ComputeConfig, best_device, kind_of, usable
from .config import TrainConfig
from .distributed import local_device, world_size
from .memory import fits, host_compute, this_machine


@dataclass(frozen=True)
class Resources:
    """What the user asks for; whatever is None or not there is chosen, or stays as it was."""

    device: str | None = None
    memory: float | None = None  # GiB of a GPU's memory to stay within; None: what is free
    settings: Mapping[str, Any] = field(default_factory=dict)  # fields of ComputeConfig
    taken: float = 0.0  # GiB of the GPU that other networks of this process take, such as a student's teachers

    @property
    def wanted_device(self) -> str | None:
        """By --device, or by --set device=...; None: whatever is best."""
        wanted = self.settings.get("device", self.device)
        return None if wanted is None else str(wanted)

    def check(self) -> None:
        """Refuse what cannot be, before anything is written."""
        if self.wanted_device is not None and not usable(self.wanted_device):
            raise UserError(f"--device {self.wanted_device}: this machine has none; use cpu")
        self._with_settings(ComputeConfig())

    def check_memory_of(self, device: str) -> None:
        if self.memory is not None and kind_of(device) != "cuda":
            raise UserError(f"--memory: means a CUDA device's memory, and {device} is none; leave it out")

    def choose(
        self, cost: Cost, training: TrainConfig, saved: ComputeConfig | None
    ) -> tuple[ComputeConfig, str | None]:
        """How to train a network of this cost, and a line that says why; `saved` is how it was computed so far."""
        wanted = self.wanted_device
        if saved is not None and self.memory is None and wanted in (None, saved.device) and usable(saved.device):
            compute = self._with_settings(saved)
            return compute, "as before" if compute == saved else "as asked"
        device = best_device(wanted or (saved.device if saved is not None and usable(saved.device) else None))
        if kind_of(device) != "cuda" or not usable(device):
            self.check_memory_of(device)
            same_kind = saved is not None and kind_of(saved.device) == kind_of(device)
            before = saved if saved is not None and same_kind else host_compute(cost, training.batch, device)
            return self._with_settings(before.model_copy(update={"device": device})), None
        self._with_settings(ComputeConfig())
        found_here, processes = this_machine(local_device(device), self.memory), world_size()
        machine = replace(found_here, memory=found_here.memory - self.taken)
        insisted = {name: value for name, value in self.settings.items() if name != "device"}
        found = fits(cost, machine, -(-training.batch // processes), device=device, insisted=insisted)
        if not found:
            limit = f"--memory {self.memory:g}GB" if self.memory is not None else f"{machine.memory:.1f} GiB free"
            asked = "".join(f" --set {name}={value}" for name, value in insisted.items())
            raise UserError(
                f"{limit}{asked}: nothing makes {cost.parameters / 1e6:,.0f}M weights fit; use a larger GPU, "
                "a smaller network, fewer settings, or --device cpu"
            )
        return found[0].compute, found[0].sentence(machine.memory, -(-training.images // processes))

    def _with_settings(self, compute: ComputeConfig) -> ComputeConfig:
        try:
            return ComputeConfig.model_validate({**compute.model_dump(), **self.settings})
        except ValidationError as error:
            known = ", ".join(ComputeConfig.model_fields)
            raise UserError(f"--set: {explain(error)}; what can be set is {known}") from error


def parse_memory(text: str) -> float:
    """`24GB`, `24 GiB`, `24` or `12.5g` -> GiB. Makers' gigabytes of GPU memory are GiB, so both mean the same."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(?:gi?b?)?\s*", text, re.IGNORECASE)
    if found is None or float(found[1]) <= 0:
        raise UserError(f"--memory {text}: write it in gigabytes, such as 24GB")
    return float(found[1])
