"""The state of a half-finished training run: exact, atomic, portable, and never a pickle.

A checkpoint is one safetensors file, `<images seen>.safetensors`, holding the weights, their average and the
optimizer's moments; its one metadata key holds the JSON of everything small. It appears under its name in one
rename, so the newest file is always a complete one.
"""

from __future__ import annotations

import json
import re
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from ..artifacts import UserError, differences, raise_if_disk_full, write_atomic
from .average import WeightAverage
from .stopping import StopRequested, StopSignal

_NAME = re.compile(r"^(\d{12})\.safetensors$")
_KEPT = 2


@dataclass
class TrainingState:
    """Everything a loop carries from one step to the next."""

    module: nn.Module
    optimizer: torch.optim.Optimizer
    average: WeightAverage
    images: int = 0

    def tensors(self) -> dict[str, Tensor]:
        """All of it as one flat dictionary: weights/, average/, optimizer/<parameter>/<moment>."""
        flat = {f"weights/{name}": value for name, value in self.module.state_dict().items()}
        flat |= {f"average/{name}": value for name, value in self.average.tensors.items()}
        for name, parameter in self.module.named_parameters():
            moments = self.optimizer.state.get(parameter, {})
            flat |= {f"optimizer/{name}/{key}": value for key, value in moments.items()}
        return {name: value.detach().contiguous() for name, value in flat.items()}

    def averaged_weights(self) -> dict[str, Tensor]:
        """What is kept at the end: the averaged parameters, and buffers as they are."""
        return {**self.module.state_dict(), **self.average.tensors}

    def restore(self, tensors: dict[str, Tensor], images: int) -> None:
        """Take over a saved state; every tensor must be there and fit."""
        self.module.load_state_dict(_under(tensors, "weights/"), strict=True)
        averages = _under(tensors, "average/")
        assert averages.keys() == self.average.tensors.keys(), "the saved average belongs to another network"
        for name, value in self.average.tensors.items():
            value.copy_(averages[name])
        for name, parameter in self.module.named_parameters():
            moments = _under(tensors, f"optimizer/{name}/")
            if moments:
                # a fused optimizer keeps everything, its step count too, on the parameter's device
                self.optimizer.state[parameter] = {
                    key: value.to(parameter.device, copy=True) for key, value in moments.items()
                }
        self.images = images


def _under(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


@dataclass
class Ledger:
    """The metrics written so far, and the losses since the last row: part of the state, so that a resumed run
    reports what an unbroken one would have."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    loss_sum: float = 0.0
    loss_count: int = 0

    def add(self, loss: float) -> None:
        self.loss_sum += loss
        self.loss_count += 1

    def report(self, images: int, extra: dict[str, Any]) -> None:
        """Close a row: the mean loss since the last one, and whatever else was measured."""
        self.rows.append({"images": images, "loss": self.loss_sum / self.loss_count, **extra})
        self.loss_sum, self.loss_count = 0.0, 0


class Checkpoints:
    """The `state/` folder of one run."""

    def __init__(self, folder: Path, seconds: float) -> None:
        self.folder = folder
        self.seconds = seconds
        self._saved_at = time.monotonic()

    def begin(self, config: dict[str, Any], whose: str) -> None:
        """Remember what this run is, or refuse to go on with a run that was something else."""
        self.folder.mkdir(parents=True, exist_ok=True)
        record = self.folder / "config.json"
        if record.exists():
            changed = differences(json.loads(record.read_bytes()), config)
            if changed:
                raise UserError(
                    f"{self.folder}: holds a half-finished run of another {whose} ({'; '.join(changed[:4])}); "
                    "go on with the old settings, choose another --out, or remove the folder"
                )
        else:
            write_atomic(record, json.dumps(config, sort_keys=True, indent=1).encode())

    def keep(self, state: TrainingState, ledger: Ledger, stop: StopSignal) -> None:
        """Called after every step: save when it is time, or save and leave when told to stop."""
        if stop.requested or time.monotonic() - self._saved_at > self.seconds:
            self.save(state, ledger)
            self._saved_at = time.monotonic()
        if stop.requested:
            raise StopRequested(f"stopped and saved after {state.images:,} images; run the same command to go on")

    def save(self, state: TrainingState, ledger: Ledger) -> None:
        """Write one checkpoint and drop all but the newest two."""
        small = json.dumps({"images": state.images, "ledger": asdict(ledger)})
        try:
            data = save(state.tensors(), metadata={"state": small})
            write_atomic(self.folder / f"{state.images:012d}.safetensors", data)
        except OSError as error:
            raise_if_disk_full(error, str(self.folder))
            raise
        for _, path in self._complete()[:-_KEPT]:
            path.unlink(missing_ok=True)

    def restore(self, state: TrainingState) -> Ledger:
        """Load the newest readable checkpoint into `state`; without one, the fresh start it already is."""
        for _, path in reversed(self._complete()):
            try:
                with safe_open(path, framework="pt") as file:
                    small = json.loads(file.metadata()["state"])
                    tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            except (SafetensorError, KeyError, ValueError):
                continue  # a disk that lost power can hold a damaged newest file; the one before is exact too
            state.restore(tensors, small["images"])
            return Ledger(**small["ledger"])
        return Ledger()

    def _complete(self) -> list[tuple[int, Path]]:
        found = [(int(m[1]), p) for p in self.folder.iterdir() if (m := _NAME.match(p.name))]
        return sorted(found)
