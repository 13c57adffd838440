"""The state of a half-finished training run: exact, atomic, portable, and never a pickle.

A checkpoint is one safetensors file, `<images seen>.safetensors`, holding the weights, their average, the optimizer's
moments and the meters; its one metadata key holds the rows of metrics as JSON. It appears under its name in one rename,
so the newest file is always a complete one. A thread writes it while training continues.
"""

from __future__ import annotations

import json
import os
import re
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from pydantic import ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from ..artifacts import UserError, differences, explain, remove_unfinished, storage_errors, write_atomic
from ..artifacts.files import fsync_path
from ..diffusion import wide_dtype
from .compute import ComputeConfig
from .config import TrainConfig
from .ema import EMA
from .optimizer import adamw, moments, restore_moments

_NAME = re.compile(r"^(\d{12})\.safetensors$")
_UNFINISHED = re.compile(r"^\.\d{12}\.writing$")
_KEPT = 2
CONFIG = "config.json"  # what a run is, beside its checkpoints
COMPUTE = "compute.json"  # how it was computed last
SHORTEST_INTERVAL = 60.0  # seconds
DISK_RATE = 16 * 2**20  # bytes a second: what a training may ask of a disk in the long run


@dataclass
class Ledger:
    """Rows of metrics so far: part of the state, so that a resumed run reports what an unbroken one does."""

    rows: list[dict[str, Any]] = field(default_factory=list)


class Counts(NamedTuple):
    """What the meters hold, read by the host."""

    loss: float | None  # mean since the last report
    skipped: int  # steps that were not finite and changed nothing, in all
    longest_row: int  # of them, the most that came one after another


class Meters:
    """Counters on the device: a step adds to them without making the host wait."""

    def __init__(self, device: torch.device) -> None:
        # since the last report: sum of losses, steps; skipped steps: all, since the last good one, the most in a row
        self.values = torch.zeros(5, dtype=wide_dtype(device), device=device)

    def add(self, loss: Tensor, finite: Tensor) -> None:
        """Count one step: `loss` scalar, `finite` 1 or 0 as a float scalar."""
        good = finite.to(self.values.dtype)
        loss = torch.where(finite > 0, loss.to(self.values.dtype), 0.0)
        self.values[:2] += torch.stack([loss, good])
        self.values[2] += 1.0 - good
        self.values[3] = (self.values[3] + 1.0) * (1.0 - good)
        self.values[4] = torch.maximum(self.values[4], self.values[3])

    def begin_row(self) -> None:
        self.values[:2] = 0.0

    def read(self) -> Counts:
        """Their values now; the host waits for the device."""
        loss_sum, steps, skipped, _, longest_row = self.values.tolist()
        return Counts(loss_sum / steps if steps else None, int(skipped), int(longest_row))


class TrainingState:
    """All that one step leaves to the next: weights, their average, the optimizer's moments, meters, images seen."""

    def __init__(self, network: nn.Module, training: TrainConfig, compute: ComputeConfig) -> None:
        self.network = network
        self.ema = EMA(network, training.ema_images)
        self.optimizer = adamw(network, training, compute)
        self.device = next(network.parameters()).device
        self.meters = Meters(self.device)
        self.images = 0
        self.updating = False  # while True, parts of the state are newer than others

    def tensors(self) -> dict[str, Tensor]:
        """All of it as one flat dictionary: weights/, ema/, optimizer/<parameter>/<moment>, meters."""
        flat = {f"weights/{name}": value for name, value in self.network.state_dict().items()}
        flat |= {f"ema/{name}": value for name, value in self.ema.tensors.items()}
        for name, parameter in self.network.named_parameters():
            flat |= {f"optimizer/{name}/{key}": value for key, value in moments(self.optimizer, parameter).items()}
        flat["meters"] = self.meters.values
        return {name: value.detach().contiguous() for name, value in flat.items()}

    def averaged_weights(self) -> dict[str, Tensor]:
        """What is kept at the end: the averaged parameters, and buffers as they are."""
        return {**self.network.state_dict(), **self.ema.tensors}

    @torch.no_grad()
    def restore(self, tensors: dict[str, Tensor], images: int) -> None:
        """Take over a saved state, however it was computed; every tensor must be there and fit."""
        self.network.load_state_dict(_under(tensors, "weights/"), strict=True)
        saved, mine = _under(tensors, "ema/"), self.ema.tensors
        assert saved.keys() == mine.keys(), "the saved average belongs to another network"
        for name, value in mine.items():
            value.copy_(saved[name])
        for name, parameter in self.network.named_parameters():
            restore_moments(self.optimizer, parameter, _under(tensors, f"optimizer/{name}/"))
        self.meters.values.copy_(tensors["meters"])
        self.images = images


def _under(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


class Checkpoints:
    """The `state/` folder of one run; a context, whose end waits for what is being written."""

    def __init__(self, folder: Path, seconds: float | None = None) -> None:
        self.folder = folder
        self._seconds = seconds
        self._saved_at = time.monotonic()
        self._size = 0
        self._writer: threading.Thread | None = None
        self._failure: BaseException | None = None

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *_: object) -> None:
        if self._writer is not None:
            self._writer.join()

    def begin(self, config: dict[str, Any], what: str) -> None:
        """Remember what this run is, or refuse to resume a run that was something else."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for left in self.folder.iterdir():  # by a process that was killed while writing
            if _UNFINISHED.match(left.name):
                left.unlink(missing_ok=True)
        remove_unfinished(self.folder)
        record = self.folder / CONFIG
        if not record.exists():
            write_atomic(record, json.dumps(config, sort_keys=True, indent=1).encode())
        elif changed := differences(json.loads(record.read_bytes()), config):
            raise UserError(
                f"{self.folder}: holds a half-finished run of another {what} ({'; '.join(changed[:4])}); "
                "use the old settings, choose another --out, or remove the folder"
            )

    def interval(self, size: int) -> float:
        """Seconds between checkpoints of `size` bytes: a minute, or longer where that would wear out a disk."""
        return self._seconds if self._seconds is not None else max(SHORTEST_INTERVAL, size / DISK_RATE)

    def keep(self, state: TrainingState, ledger: Ledger, stopping: bool) -> None:
        """Called after every step: begin to save when it is due, or save and wait for it when stopping."""
        if stopping:
            self.save(state, ledger)
            self.finish()
            return
        writing = self._writer is not None and self._writer.is_alive()
        if not writing and time.monotonic() - self._saved_at >= self.interval(self._size):
            self.save(state, ledger)

    def save(self, state: TrainingState, ledger: Ledger) -> None:
        """Copy the state as it is now into the host's memory, and let a thread write the copy."""
        self.finish()
        copies = {name: value.to("cpu", copy=True) for name, value in state.tensors().items()}
        self._size = sum(value.nbytes for value in copies.values())
        small = json.dumps({"images": state.images, "rows": ledger.rows})
        self._saved_at = time.monotonic()
        self._writer = threading.Thread(target=self._write, args=(copies, state.images, small), name="atoll-checkpoint")
        self._writer.start()

    def finish(self) -> None:
        """Wait until what is being written is there, and raise what went wrong."""
        if self._writer is not None:
            self._writer.join()
            self._writer = None
        if self._failure is not None:
            failure, self._failure = self._failure, None
            with storage_errors(str(self.folder)):
                raise failure

    def _write(self, copies: dict[str, Tensor], images: int, small: str) -> None:
        """In the thread: write under another name, flush, rename, and drop all but the newest two."""
        temporary = self.folder / f".{images:012d}.writing"
        try:
            save_file(copies, temporary, metadata={"state": small})
            fsync_path(temporary)
            os.replace(temporary, self.folder / f"{images:012d}.safetensors")
            fsync_path(self.folder)
            for _, path in self._complete()[:-_KEPT]:
                path.unlink(missing_ok=True)
        except BaseException as error:  # noqa: BLE001, it is raised where the file is waited for
            temporary.unlink(missing_ok=True)
            self._failure = error

    def restore(self, state: TrainingState) -> Ledger:
        """Load the newest readable checkpoint into `state`; without one, the fresh start it already is."""
        for _, path in reversed(self._complete()):
            try:
                with safe_open(path, framework="pt") as file:
                    small = json.loads((file.metadata() or {})["state"])
                    tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            except (SafetensorError, KeyError, ValueError):
                continue  # a disk that lost power can hold a damaged newest file; the one before is exact too
            state.restore(tensors, small["images"])
            return Ledger(small["rows"])
        return Ledger()

    def _complete(self) -> list[tuple[int, Path]]:
        found = [(int(m[1]), p) for p in self.folder.iterdir() if (m := _NAME.match(p.name))]
        return sorted(found)


def saved_compute(folder: Path) -> ComputeConfig | None:
    """How the half-finished run in this folder was computed last; None where there is none."""
    record = folder / COMPUTE
    if not record.exists():
        return None
    try:
        return ComputeConfig.model_validate_json(record.read_bytes())
    except ValidationError as error:
        raise UserError(f"{record}: not valid ({explain(error)}); remove it, and it is chosen again") from error


def save_compute(folder: Path, compute: ComputeConfig) -> None:
    write_atomic(folder / COMPUTE, compute.model_dump_json(indent=1).encode())
