"""Launch files: one per order, for a scheduler that starts and restarts islands.

Each runs one command that goes on where it was stopped, so a job that is preempted or requeued loses nothing.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from ..artifacts import Artifact, Store, UserError

Launcher = Literal["skypilot", "slurm", "shell"]
SUFFIX: dict[Launcher, str] = {"skypilot": "yaml", "slurm": "sbatch", "shell": "sh"}
FOLDER = "launch"
SPARE = 1.5  # of the predicted hours that a job may take
USUAL_HOURS = 48.0
# SkyPilot's names of cards that clouds have, with their memory in GiB
SKY_GPUS = {"L4": 24, "A10G": 24, "RTX4090": 24, "L40S": 48, "A100-80GB": 80, "H100": 80, "H200": 139}


def write_launch(orders: Artifact, launcher: str, url: str | None) -> Store:
    """Write a launch file per order below RUN/launch: with `url` islands join there, else they train from here."""
    kind = check_launcher(launcher)
    place = orders.store.parent.child(FOLDER, orders.store.name)
    jobs: Sequence[Mapping[str, Any]] = orders.config.get("islands", ())
    for number, file in enumerate(orders.names()):
        name = file.removesuffix(".json")
        job = jobs[number] if number < len(jobs) else {}
        hours = SPARE * float(job.get("hours", USUAL_HOURS / SPARE))
        text = {"skypilot": skypilot, "slurm": slurm, "shell": shell}[kind](
            name, command(orders, name, url), hours, job
        )
        place.write(f"{name}.{SUFFIX[kind]}", text.encode())
    return place


def check_launcher(name: str) -> Launcher:
    for known in SUFFIX:
        if name == known:
            return known
    raise UserError(f"--launch {name}: not known; use one of {', '.join(SUFFIX)}")


def command(orders: Artifact, name: str, url: str | None) -> str:
    if url is not None:
        words = ["atoll", "join", url, "--order", name, "--out", f"expert-{name}"]
    else:
        words = ["atoll", "train", f"{orders.store}/{name}.json", "--out", f"expert-{name}"]
    return " ".join(map(shlex.quote, words))


def shell(name: str, line: str, hours: float, job: Mapping[str, Any]) -> str:
    return f"#!/bin/sh\n# order {name}: run it again after any stop\nset -eu\nexec {line}\n"


def slurm(name: str, line: str, hours: float, job: Mapping[str, Any]) -> str:
    minutes = max(10, round(60 * hours))
    return "\n".join(
        [
            "#!/bin/sh",
            f"#SBATCH --job-name=atoll-{name}",
            "#SBATCH --gpus=1",
            f"#SBATCH --time={minutes // 60:02d}:{minutes % 60:02d}:00",
            "#SBATCH --requeue",
            "#SBATCH --open-mode=append",
            "#SBATCH --signal=TERM@120",
            f"#SBATCH --output=atoll-{name}.log",
            "set -eu",
            f"exec srun {line}",
            "",
        ]
    )


def skypilot(name: str, line: str, hours: float, job: Mapping[str, Any]) -> str:
    need = float(job.get("memory_gib", 0.0))
    gpus = ", ".join(f"{gpu}: 1" for gpu, memory in SKY_GPUS.items() if memory >= need) or "H200: 1"
    return "\n".join(
        [
            f"# sky jobs launch {name}.yaml: a managed job, started again elsewhere when it is preempted",
            f"name: atoll-{name.replace('_', '-').lower()}",
            "resources:",
            f"  accelerators: {{{gpus}}}  # any of them",
            "  use_spot: true",
            "setup: |",
            "  pip install 'atoll-diffusion[s3]'",
            "run: |",
            f"  {line}",
            "",
        ]
    )
