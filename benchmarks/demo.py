"""How long the demo takes and what it reaches, from an empty folder, for one or more seeds.

    python benchmarks/demo.py --out benchmarks/results/demo.json [--seeds 0 1 2]

Each seed runs `atoll demo`, the same again (everything is there), and `atoll demo --compare`, each as a command of
its own, and keeps the evaluation. Seconds depend on the machine and on who else uses it: the load before the run is
recorded beside them.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--work", type=Path, help="keep the runs below this folder")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        work = arguments.work or Path(temporary)
        runs = [measure(work / f"seed-{seed}", seed) for seed in arguments.seeds]
    machine = {"cores": os.cpu_count(), "machine": platform.machine(), "python": platform.python_version()}
    arguments.out.write_text(json.dumps({"machine": machine, "runs": runs}, indent=1) + "\n")
    for run in runs:
        print(json.dumps({key: value for key, value in run.items() if key != "arms"}, indent=1))


def measure(folder: Path, seed: int) -> dict[str, Any]:
    load = os.getloadavg()[0]
    seconds = {
        "demo": timed("--out", str(folder), "--seed", str(seed)),
        "demo again": timed("--out", str(folder), "--seed", str(seed)),
        "compare, after demo": timed("--out", str(folder), "--seed", str(seed), "--compare"),
    }
    evaluation = json.loads((folder / "evaluation.json").read_bytes())
    kept = ("name", "recognised", "frechet", "nearest_median")
    return {
        "seed": seed,
        "load_before": load,
        "seconds": seconds,
        "floors": evaluation["floors"],
        "against_monolith": evaluation["against_monolith"],
        "arms": [{key: arm[key] for key in kept} for arm in evaluation["arms"]],
    }


def timed(*arguments: str) -> float:
    began = time.monotonic()
    subprocess.run([sys.executable, "-m", "atoll", "demo", *arguments], check=True, stdout=subprocess.DEVNULL)
    return round(time.monotonic() - began, 1)


if __name__ == "__main__":
    main()
