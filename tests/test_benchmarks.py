"""Benchmarks that wait for a GPU run here at a size that says nothing, so that they run there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def test_the_sampling_benchmark_runs(tmp_path: Path) -> None:
    out = tmp_path / "sampling.json"
    script = ROOT / "benchmarks" / "sampling.py"
    command = [sys.executable, script, "--smoke", "--out", out, "--work", tmp_path / "work"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "ATOLL_COMMIT": "0000000", "PYTHONPATH": str(ROOT / "src")}
    process = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert process.returncode == 0, process.stderr[-2000:]
    record = json.loads(out.read_text())
    assert record["machine"]["commit"] == "0000000"
    assert {name: part["error"] for name, part in record["parts"].items() if "error" in part} == {}
    assert len(record["parts"]) == 8
    assert len(record["targets"]) >= 10, "every target is looked for where it is"
    # recorded from the demo's router: calm with a prompt, less so without one (pilot2: 0.62 changes in 50 steps)
    calm, restless = (record["machine"]["traces"][name]["top1_changes"] for name in ("balanced", "unprompted"))
    assert calm < 0.2 < restless < 1.5
