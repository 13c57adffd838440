"""Launch files that their own programs can read. tests/exchange/test_fleet.py runs them."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path

import pytest
import yaml

from atoll.cli import main
from atoll.planning.launch import write_launch
from atoll.planning.stage import plan

URL = "s3://bucket/it's here"
PACKAGE = "git+https://github.com/you/atoll"


@pytest.mark.parametrize("launcher", ["skypilot", "slurm", "shell"])
def test_every_order_has_a_launch_file_that_runs_one_command(launcher: str, run: Path) -> None:
    sky, orders = launcher == "skypilot", plan(run / "data", run / "partition", run / "orders")
    files = sorted(write_launch(orders, launcher, URL, PACKAGE if sky else None).path.iterdir())
    assert [file.stem for file in files] == [f"{k:02d}" for k in range(8)]
    text = files[1].read_text()
    if sky:
        job = yaml.safe_load(text)
        assert set(job) == {"name", "resources", "setup", "run"}
        assert shlex.split(job["setup"]) == ["pip", "install", f"atoll-diffusion[s3] @ {PACKAGE}"]
        line = job["run"].strip()
    else:
        subprocess.run(["sh", "-n", str(files[1])], check=True)
        line = text.strip().splitlines()[-1].removeprefix("exec ").removeprefix("srun ")
    assert shlex.split(line) == ["atoll", "join", URL, "--order", "01", "--out", "expert-01"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--launch skypilot", "--launch skypilot: a cloud machine can read neither this run nor your clone; add --url"),
        ("--launch skypilot --url s3://b/demo", "and --package with what pip installs atoll from"),
        ("--launch shell --package .", "--package .: only --launch skypilot installs atoll; leave it out"),
        ("--launch swarm", "--launch swarm: not known; use one of skypilot, slurm, shell"),
        ("--url s3://b/demo", "--url: has no meaning with no --launch"),
    ],
)
def test_jobs_that_could_not_run_are_refused(
    options: str, words: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A SkyPilot job once trained an order below /home, with a package that no index has."""
    with pytest.raises(SystemExit) as exit_:
        main(["plan", str(run / "data"), *options.split()])
    assert exit_.value.code == 2
    assert words in capsys.readouterr().err
    assert not (run / "orders").exists()
