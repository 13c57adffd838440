"""examples/tiny_imagenet to its report, as small as it goes, with Tiny ImageNet and with a folder of one's own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from photographs import write_photographs
from runs import digests

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "tiny_imagenet"
SMALLEST = {"SMALL": "1", "CLASSES": "6", "EACH": "40", "CLUSTERS": "2", "SAMPLES": "24", "STEPS": "4"}
ROUTER = "--set training.images=640"
NETWORK = ["--images", "640", "--set", "network.width=64", "--set", "network.depth=2", "--set", "network.heads=2"]


def run_example(shared: Path, source: Path, run: Path) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "ATOLL_MODELS": str(shared / "models"), **SMALLEST}
    process = subprocess.run(
        ["sh", str(EXAMPLE / "run.sh"), str(source), str(run), *NETWORK],
        capture_output=True,
        text=True,
        env=environment | {"ROUTER": ROUTER, "PYTHON": os.environ.get("PYTHON", sys.executable)},
        check=False,
    )
    assert process.returncode == 0, f"{process.stdout[-3000:]}\n{process.stderr[-3000:]}"
    return process.stdout


@pytest.mark.slow
@pytest.mark.shared
@pytest.mark.timeout(3600)
def test_from_parquet_files_to_the_report_and_what_free_text_gives(shared: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run_example(shared, shared / "datasets/tiny-imagenet", run)
    evaluation = json.loads((run / "evaluation.json").read_bytes())
    assert len(evaluation["configurations"]) == 4, "two routes at two guidances"
    assert evaluation["features"] == ["efficientnet-lite0@128"]
    assert (run / "report.html").is_file()
    held = json.loads((run / "held_out.json").read_bytes())
    for kind in ("template", "synonym", "paraphrase"):
        low, high = held[kind]["interval"]
        assert 0 <= low <= held[kind]["class_accuracy"] <= high <= 1
    assert (held["sampling"]["steps"], held["data"]) == (4, evaluation["data"])
    before = digests(run)
    assert "already there" in run_example(shared, shared / "datasets/tiny-imagenet", run)
    assert digests(run) == before, "the same command again changes nothing"


@pytest.mark.slow
@pytest.mark.shared
@pytest.mark.timeout(3600)
def test_the_same_script_takes_a_folder_of_ones_own(shared: Path, tmp_path: Path) -> None:
    write_photographs(tmp_path / "photos", per_class=40, size=64, captions=True)
    run_example(shared, tmp_path / "photos", tmp_path / "run")
    assert (tmp_path / "run/report.html").is_file()
    assert not (tmp_path / "run/held_out.json").exists(), "nothing was kept from training"


def test_without_its_two_places_it_says_what_it_wants() -> None:
    process = subprocess.run(["sh", str(EXAMPLE / "run.sh")], capture_output=True, text=True, check=False)
    assert process.returncode == 2
    assert "run.sh my-photos/ runs/mine" in process.stderr
