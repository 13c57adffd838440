"""The state of a half-finished training run: exact, atomic, portable, and never a pickle.

A checkpoint is one safetensors file, `<images seen>.safetensors`, holding the weights, their average, the
optimizer's moments and the meters; its one metadata key holds the JSON of everything small. It appears under its name
in one rename, so the newest file is always a complete one.

Saving does not stop training. The state is copied to the host's memory beside the next forward and backward pass
(only the next update waits for it), and a thread writes it out.
"""

from __future__ import annotations

import json
import os
import re
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ..artifacts import UserError, differences, explain, remove_unfinished, storage_errors, write_atomic
from ..artifacts.files import fsync_path
from .execution import Execution
from .packing import Layout, pinned_bytes, unpin
from .state import TrainingState

_NAME = re.compile(r"^(\d{12})\.safetensors$")
_UNFINISHED = re.compile(r"^\.\d{12}\.writing$")
_KEPT = 2
CONFIG = "config.json"  # what a run is, beside its checkpoints
SHORTEST_INTERVAL = 60.0  # seconds
DISK_RATE = 16 * 2**20  # bytes a second: what a training may ask of a disk in the long run


@dataclass
class Ledger:
    """Rows of metrics so far: part of the state, so that a resumed run reports what an unbroken one does."""

    rows: list[dict[str, Any]] = field(default_factory=list)


class Checkpoints:
    """The `state/` folder of one run; a context, whose end waits for what is being written."""

    def __init__(self, folder: Path, seconds: float | None = None) -> None:
        self.folder = folder
        self._seconds = seconds
        self._saved_at = time.monotonic()
        self._writer: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._host: tuple[Layout, Tensor] | None = None
        self._preparing: threading.Thread | None = None

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *_: object) -> None:
        self._prepared()
        if self._writer is not None:
            self._writer.join()
        if self._host is not None:
            unpin(self._host[1])

    def begin(self, config: dict[str, Any], whose: str) -> None:
        """Remember what this run is, or refuse to go on with a run that was something else."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for left in self.folder.iterdir():  # by a process that was killed while writing
            if _UNFINISHED.match(left.name):
                left.unlink(missing_ok=True)
        remove_unfinished(self.folder)
        record = self.folder / CONFIG
        if record.exists():
            changed = differences(json.loads(record.read_bytes()), config)
            if changed:
                raise UserError(
                    f"{self.folder}: holds a half-finished run of another {whose} ({'; '.join(changed[:4])}); "
                    "go on with the old settings, choose another --out, or remove the folder"
                )
        else:
            write_atomic(record, json.dumps(config, sort_keys=True, indent=1).encode())

    def interval(self, size: int) -> float:
        """Seconds between checkpoints of `size` bytes: a minute, or longer where that would wear out a disk."""
        return self._seconds if self._seconds is not None else max(SHORTEST_INTERVAL, size / DISK_RATE)

    def keep(self, state: TrainingState, ledger: Ledger, stopping: bool) -> None:
        """Called after every step: begin to save when it is time, or save and wait for it when told to stop."""
        if stopping:
            self.save(state, ledger)
            self.finish()
            return
        writing = any(thread is not None and thread.is_alive() for thread in (self._writer, self._preparing))
        size = 0 if self._host is None else self._host[0].size
        if not writing and time.monotonic() - self._saved_at >= self.interval(size):
            self.save(state, ledger)

    def prepare(self, state: TrainingState) -> None:
        """Begin to take the host memory that copies of this state need: pinning gigabytes takes seconds."""
        layout = Layout.of(state.tensors())
        if self._host is not None and self._host[0] == layout:
            return
        self.finish()
        if self._host is not None:
            unpin(self._host[1])
            self._host = None
        device = next(state.network.parameters()).device

        def take() -> None:
            if device.type == "cuda":
                torch.cuda.set_device(device)  # a thread begins on the first card, and would take memory there
            try:
                self._host = layout, pinned_bytes(layout.size, device)
            except (RuntimeError, MemoryError) as error:
                needed = f"{layout.size / 2**30:.1f} GiB of this machine's memory"
                self._failure = UserError(f"a checkpoint needs {needed}, and they are not to be had; free some")
                self._failure.__cause__ = error

        self._preparing = threading.Thread(target=take, name="atoll-pinning")
        self._preparing.start()

    def save(self, state: TrainingState, ledger: Ledger) -> None:
        """Copy the state as it is now and let a thread write it; returns when the copy is under way."""
        self.finish()
        self.prepare(state)
        self.finish()
        assert self._host is not None
        layout, buffer = self._host
        copies = layout.views(buffer)
        copied = copy_out(state, copies)
        small = json.dumps({"images": state.images, "rows": ledger.rows})
        self._saved_at = time.monotonic()
        self._writer = threading.Thread(
            target=self._write, args=(copies, copied, state.images, small), name="atoll-checkpoint"
        )
        self._writer.start()

    def _prepared(self) -> None:
        if self._preparing is not None:
            self._preparing.join()
            self._preparing = None

    def finish(self) -> None:
        """Wait until what is being written is there, and raise what went wrong."""
        self._prepared()
        if self._writer is not None:
            self._writer.join()
            self._writer = None
        if self._failure is not None:
            failure, self._failure = self._failure, None
            with storage_errors(str(self.folder)):
                raise failure

    def _write(self, copies: dict[str, Tensor], copied: torch.cuda.Event | None, images: int, small: str) -> None:
        """In the thread: write under another name, flush, rename, and drop all but the newest two."""
        temporary = self.folder / f".{images:012d}.writing"
        try:
            if copied is not None:
                copied.synchronize()
            save_file(copies, temporary, metadata={"state": small})
            fsync_path(temporary)
            os.replace(temporary, self.folder / f"{images:012d}.safetensors")
            fsync_path(self.folder)
            for _, path in self._complete()[:-_KEPT]:
                path.unlink(missing_ok=True)
        except BaseException as error:  # noqa: BLE001, it is raised by whoever waits for the file
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


def saved_execution(folder: Path) -> Execution | None:
    """How the half-finished run in this folder was computed last; None where there is none."""
    record = folder / "execution.json"
    if not record.exists():
        return None
    try:
        return Execution.model_validate_json(record.read_bytes())
    except ValidationError as error:
        raise UserError(
            f"{record}: not valid ({explain(error)}); remove it, and how to compute is chosen anew"
        ) from error


def save_execution(folder: Path, execution: Execution) -> None:
    write_atomic(folder / "execution.json", execution.model_dump_json(indent=1).encode())


def copy_out(state: TrainingState, copies: dict[str, Tensor]) -> torch.cuda.Event | None:
    """Copy a state into host memory. On CUDA on a stream of its own: the next update waits for it, nothing else."""
    device = next(state.network.parameters()).device
    tensors = state.tensors()
    if device.type != "cuda":
        for name, value in tensors.items():
            copies[name].copy_(value)
        return None
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for name, value in tensors.items():
            copies[name].copy_(value, non_blocking=True)
        state.copied = stream.record_event()
    return state.copied
