"""Launch files: one per order, for a scheduler that starts and restarts islands.

Each runs one command that resumes where it was stopped, so a job that is preempted or requeued loses nothing.
"""

from __future__ import annotations

import shlex

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
#SBATCH --time={minutes}
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
setup: |
  pip install {package}
run: |
  {command}
"""
TEMPLATES = {"skypilot": ("yaml", SKYPILOT), "slurm": ("sbatch", SLURM), "shell": ("sh", SHELL)}


def check_launch(launcher: str, url: str | None, package: str | None) -> None:
    """Refuse a launcher that does not exist, and jobs in a cloud that could reach neither orders nor atoll."""
    if launcher not in TEMPLATES:
        raise UserError(f"--launch {launcher}: not known; use one of {', '.join(TEMPLATES)}")
    if launcher == "skypilot" and (url is None or package is None):
        raise UserError(
            "--launch skypilot: a cloud machine can read neither this run nor your clone; add --url with where `atoll "
            "publish` puts the run, and --package with what pip installs atoll from, such as "
            "git+https://github.com/you/atoll"
        )
    if launcher != "skypilot" and package is not None:
        raise UserError(f"--package {package}: only --launch skypilot installs atoll; leave it out")


def write_launch(orders: Artifact, launcher: str, url: str | None, package: str | None = None) -> Store:
    """Write a launch file per order below RUN/launch: with `url` islands join there, else they train from here."""
    check_launch(launcher, url, package)
    place = orders.store.parent.child(FOLDER, orders.store.name)
    names = [file.removesuffix(".json") for file in orders.names()]
    ending, template = TEMPLATES[launcher]
    for name, job in zip(names, orders.config.get("islands") or [{}] * len(names), strict=True):
        command = ["atoll", "train", f"{orders.store}/{name}.json"] if url is None else ["atoll", "join", url]
        command += ["--out", f"expert-{name}"] if url is None else ["--order", name, "--out", f"expert-{name}"]
        content = template.format(
            name=name,
            task=name.replace("_", "-").lower(),
            command=shlex.join(command),
            minutes=max(10, round(60 * (SLACK * job["hours"] if job else DEFAULT_HOURS))),
            gpus=", ".join(f"{gpu}: 1" for gpu, gib in SKY_GPUS.items() if gib >= job.get("memory_gib", 0)),
            package=shlex.quote(f"atoll-diffusion[s3] @ {package}"),
        )
        place.write(f"{name}.{ending}", content.encode())
    return place
