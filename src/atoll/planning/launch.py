"""Launch files: one per order, for a scheduler that starts and restarts islands.

Each runs one command that resumes where it was stopped, so a job that is preempted or requeued loses nothing.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..artifacts import Artifact, Store, UserError

FOLDER = "launch"
SLACK = 1.5  # a job may take so many times the predicted hours
DEFAULT_HOURS = 48.0
# SkyPilot's names of GPUs that clouds have, with their memory in GiB
SKY_GPUS = {"L4": 24, "A10G": 24, "RTX4090": 24, "L40S": 48, "A100-80GB": 80, "H100": 80, "H200": 139}

SHELL = """\
#!/bin/sh
# order {name}: run it again after any stop
set -eu
exec {command}
"""
SLURM = """\
#!/bin/sh
#SBATCH --job-name=atoll-{name}
#SBATCH --gpus=1
#SBATCH --time={hours:02d}:{minutes:02d}:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=TERM@120
#SBATCH --output=atoll-{name}.log
set -eu
exec srun {command}
"""
SKYPILOT = """\
# sky jobs launch {name}.yaml: a managed job, started again elsewhere when it is preempted
name: atoll-{task}
resources:
  accelerators: {{{gpus}}}  # any of them
  use_spot: true
{setup}
run: |
  {command}
"""
TEMPLATES = {"skypilot": ("yaml", SKYPILOT), "slurm": ("sbatch", SLURM), "shell": ("sh", SHELL)}


def check_launch(launcher: str, url: str | None, package: str | None) -> None:
    """Refuse a launcher that does not exist, and jobs in a cloud that could reach neither orders nor atoll."""
    if launcher not in TEMPLATES:
        raise UserError(f"--launch {launcher}: not known; use one of {', '.join(TEMPLATES)}")
    if launcher == "skypilot" and url is None:
        raise UserError(
            "--launch skypilot: a cloud machine cannot read this run; add --url with where `atoll publish` puts it"
        )
    if launcher == "skypilot" and package is None:
        raise UserError(
            "--launch skypilot: add --package with what a cloud machine installs atoll from: your clone, or a URL such "
            "as git+https://github.com/you/atoll"
        )
    if launcher != "skypilot" and package is not None:
        raise UserError(f"--package {package}: only --launch skypilot installs atoll; leave it out")


def write_launch(orders: Artifact, launcher: str, url: str | None, package: str | None = None) -> Store:
    """Write a launch file per order below RUN/launch: with `url` islands join there, else they train from here."""
    check_launch(launcher, url, package)
    place = orders.store.parent.child(FOLDER, orders.store.name)
    jobs: Sequence[Mapping[str, Any]] = orders.config.get("islands", ())
    ending, template = TEMPLATES[launcher]
    for number, file in enumerate(orders.names()):
        name = file.removesuffix(".json")
        job = jobs[number] if number < len(jobs) else {}
        minutes = max(10, round(60 * SLACK * float(job.get("hours", DEFAULT_HOURS / SLACK))))
        memory = float(job.get("memory_gib", 0.0))
        content = template.format(
            name=name,
            task=name.replace("_", "-").lower(),
            command=command(orders, name, url),
            hours=minutes // 60,
            minutes=minutes % 60,
            gpus=", ".join(f"{gpu}: 1" for gpu, most in SKY_GPUS.items() if most >= memory) or "H200: 1",
            setup=setup_of(package),
        )
        place.write(f"{name}.{ending}", content.encode())
    return place


def setup_of(package: str | None) -> str:
    """SkyPilot's lines that install atoll: from a clone, which is copied to the machine, or from a URL."""
    if package is not None and Path(package).is_dir():
        return f"workdir: {json.dumps(str(Path(package).resolve()))}\nsetup: |\n  pip install '.[s3]'"
    return f"setup: |\n  pip install {shlex.quote(f'atoll-diffusion[s3] @ {package}')}"


def command(orders: Artifact, name: str, url: str | None) -> str:
    """The line that trains one order."""
    if url is not None:
        words = ["atoll", "join", url, "--order", name, "--out", f"expert-{name}"]
    else:
        words = ["atoll", "train", f"{orders.store}/{name}.json", "--out", f"expert-{name}"]
    return shlex.join(words)
