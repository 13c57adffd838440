"""From a task to a finished artifact: what training an expert, a router and a student have in common."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from ..artifacts import Artifact, UserError, cleanup, file_lock, find
from ..models.accounting import account
from ..models.dit import DiTConfig
from .checkpoint import saved_compute
from .compute import ComputeConfig, device_name, opened
from .config import TrainConfig
from .distributed import is_main
from .loop import Progress, Task, Watch, averaged, fit
from .resources import Resources
from .result import Result, write_result
from .seeds import generator

LOG_SECONDS = 1.0, 30.0  # between lines of progress: at first, when the user looks, and in the long run


class ArtifactTask(Task, Protocol):
    """A task whose network becomes an artifact."""

    def finish(self, compute: ComputeConfig) -> Result:
        """Called once, at the end, while the network has its averaged weights."""
        ...


def train_artifact(
    out: Path,
    kind: str,
    build: Callable[[ComputeConfig, str], ArtifactTask],
    *,
    architecture: DiTConfig,
    training: TrainConfig,
    identity: dict[str, Any],
    parents: Mapping[str, str],
    what: str,
    resources: Resources,
    notes: Sequence[str] = (),
    checkpoint_seconds: float | None = None,
    watch: Watch | None = None,
) -> Artifact | None:
    """Train the network of the task that `build` makes for a device, and leave it in `out`, or find it done there.

    One process works in `out` at a time; work in progress is in `out/state/`, under `identity` and `parents`, and the
    same call resumes. `notes` are printed at the beginning. Of several processes that train together all but the main
    one return None.
    """
    if (done := finished(out, kind, parents, what)) is not None:
        return done
    main, state = is_main(), out / "state"
    with file_lock(state) if main else nullcontext():
        if main and (done := finished(out, kind, parents, what)) is not None:  # by the process that held the lock
            return done
        compute, reason = resources.choose(account(architecture), training, saved_compute(state))
        with opened(compute, resources.memory) as device:
            task = build(compute, str(device))
            log = TrainLog(out / "log.jsonl", watch, quiet=not main)
            for note in [f"computing: {reason}"] * (reason is not None) + list(notes):
                log(Progress(0, training.images, note=note))
            log.write(event="start", device=str(device))
            fitted = fit(
                task,
                training,
                compute,
                state,
                identity={**identity, "parents": dict(parents)},
                what=what,
                checkpoint_seconds=checkpoint_seconds,
                watch=log,
            )
            if not fitted.is_main:
                return None
            with averaged(fitted.state):
                result = task.finish(fitted.compute)
            provenance = {"compute": fitted.compute.model_dump(), "device": device_name(device)}
            weights = fitted.state.averaged_weights()
            artifact = write_result(out, kind, weights, result, fitted.rows, parents=parents, provenance=provenance)
        log.write(event="finished", images=training.images)
        shutil.rmtree(state, ignore_errors=True)
    return artifact


def finished(out: Path, kind: str, parents: Mapping[str, str], what: str) -> Artifact | None:
    """The artifact already in `out`, if it was made from these parents: for example this order and initial expert."""
    artifact = find(out)
    if artifact is None:
        return None
    if artifact.manifest.kind != kind or artifact.manifest.parents != parents:
        raise UserError(f"{out}: already holds an artifact of another {what}; choose another --out")
    cleanup(out)
    return artifact


def seeded(build: Callable[[torch.Generator], nn.Module], seed: int) -> Any:
    """A network whose weights are drawn from a seed alone, the global random state being as before.

    Layers of torch draw from the global state before `build` initializes them, so that is put back.
    """
    with torch.random.fork_rng(devices=[]):
        return build(generator(seed, "weights"))


class TrainLog:
    """log.jsonl: what happened when, and how fast. Never listed in a manifest, so it may hold times."""

    def __init__(self, path: Path, watch: Watch | None, quiet: bool) -> None:
        """`quiet`: in a process that is not the main one, nothing is written or shown."""
        self._path, self._watch, self._quiet = path, watch, quiet
        self._began, self._due = time.monotonic(), 0.0
        if not quiet:
            path.parent.mkdir(parents=True, exist_ok=True)

    def write(self, **fields: str | int | float | None) -> None:
        if not self._quiet:
            with self._path.open("a") as stream:
                stream.write(json.dumps({"time": round(time.time(), 3), **fields}) + "\n")

    def __call__(self, progress: Progress) -> None:
        """Called after every step: written down now and then, and passed on to `watch`."""
        if self._quiet:
            return
        now = time.monotonic()
        if progress.note is not None:
            self.write(event="note", note=progress.note)
        elif now >= self._due or progress.images == progress.total:
            shortest, longest = LOG_SECONDS
            self._due = now + min(longest, max(shortest, (now - self._began) / 20))
            self.write(
                event="progress",
                images=progress.images,
                total=progress.total,
                loss=progress.loss,
                val_loss=progress.val_loss,
                images_per_s=None if progress.rate is None else round(progress.rate, 1),
                skipped=progress.skipped,
            )
        if self._watch is not None:
            self._watch(progress)
