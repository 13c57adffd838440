"""Small real runs for tests: made once per session, shared by all test processes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_file

from atoll.artifacts import Store, finalize, find

if TYPE_CHECKING:
    from atoll.registry.versions import Version

EXPERT_FILES = ["expert.json", "metrics.jsonl", "model.safetensors"]
ATOLL = [sys.executable, "-m", "atoll"]


def atoll(*arguments: str | Path, cwd: Path | None = None, check: bool = True) -> subprocess.CompletedProcess[str]:
    """The real command line in a process of its own."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "160"}
    process = subprocess.run(
        [*ATOLL, *map(str, arguments)], cwd=cwd, capture_output=True, text=True, env=environment, check=False
    )
    if check and process.returncode != 0:
        raise AssertionError(f"atoll {' '.join(map(str, arguments))} failed:\n{process.stdout}\n{process.stderr}")
    return process


def made_once(root: Path, name: str, make: Callable[[Path], None]) -> Path:
    """A folder made by the first test process that needs it; the others wait."""
    from filelock import FileLock  # here, since tests on a bare machine with a GPU make no run

    place = root / name
    with FileLock(root / f"{name}.lock"):
        if not (root / f"{name}.done").exists():
            make(place)
            (root / f"{name}.done").touch()
    return place


def make_planned(run: Path) -> None:
    """data, partition and orders of the digits, with a budget of seconds."""
    atoll("prepare", "digits", "--out", run / "data")
    atoll("partition", run / "data", "-k", "3", "--out", run / "partition")
    settings = ["training.images=1920", "training.batch=32", "training.warmup_images=64", "training.ema_images=64"]
    settings += ["network.width=32", "network.depth=2"]
    atoll("plan", run / "data", "--objectives", "1ddpm:2flow", *[part for s in settings for part in ("--set", s)])


def make_demo(run: Path) -> None:
    atoll("demo", "--size", "tiny", "--out", run)


def versions_of(run: Path | Store) -> list[Version]:
    """Every version of a run's model that can be read, newest first."""
    from atoll.registry.versions import Version, history

    return [version for _, version in history(Store.at(run)) if isinstance(version, Version)]


def digests(run: Path) -> dict[str, str]:
    """Digest of every artifact below a run, by its place, and of the files that are not artifacts."""
    found = {}
    for manifest in run.rglob("manifest.json"):
        if "inbox" not in manifest.parts and not any(part.endswith(".partial") for part in manifest.parts):
            artifact = find(manifest.parent)
            assert artifact is not None
            found[str(manifest.parent.relative_to(run))] = artifact.digest
    for name in ("ensemble/000010.json", "evaluation.json"):
        found[name] = (run / name).read_text() if (run / name).exists() else "missing"
    return found


def scores_in(results: Path, name: str) -> list[float]:
    """The value of a score in every configuration of an evaluation, by the data's own features."""
    evaluation = json.loads((results / "evaluation.json").read_bytes())
    own = evaluation["features"][0]
    return [row["scores"][own][name]["value"] for row in evaluation["configurations"]]


def resealed(expert: Path, place: Path, weights: dict[str, torch.Tensor] | None = None, **card: object) -> Path:
    """An expert folder as somebody with bad intentions or bad luck would hand it in, manifest and all."""
    shutil.copytree(expert, place)
    parents = json.loads((place / "manifest.json").read_bytes())["parents"]
    (place / "manifest.json").unlink()
    content = json.loads((place / "expert.json").read_bytes()) | card
    (place / "expert.json").write_text(json.dumps(content))
    if weights is not None:
        save_file(weights, place / "model.safetensors")
    parents |= {"order": content.get("order") or ""}
    finalize(place, EXPERT_FILES, "expert", config=content, parents=parents, license=content.get("license"))
    return place
