"""Students of the demo's ensembles (2 DDPM and 6 flow experts on digits) compared with the ensemble they learned from.

    python benchmarks/distill.py --work FOLDER [--seeds 0 1 2] [--only default] [--out benchmarks/results/distill.csv]

For every seed the demo is trained, then a student in each of these ways, all from the same orders:

    default       as `atoll distill` does it: from the best expert with the student's objective
    random        from random weights
    data-half     with half of the image's own target
    from-samples  without data, on images that the ensemble generated

All are sampled from the same noise by `atoll evaluate` and measured alike; a row has the FD of a student over that of
the ensemble by top-1. Every command resumes, so this script does, too: give it the same --work.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from records import RESULTS, ROOT, write_record

WAYS = {
    "default": [],
    "random": ["--start", "random"],
    "data-half": ["--data-weight", "0.5"],
    "from-samples": ["--from-samples"],
}
GUIDANCES = ("1", "2")
DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
PROMPTS = [f"a handwritten {digit}" for digit in DIGITS]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--only", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("-n", type=int, default=4000, help="samples per configuration")
    parser.add_argument("--size", default="demo", choices=["demo", "tiny"])
    parser.add_argument("--out", type=Path, default=RESULTS / "distill.csv")
    asked = parser.parse_args()
    asked.work.mkdir(parents=True, exist_ok=True)
    rows = [row for seed in asked.seeds for row in measured(asked, seed)]
    write_record(asked.out, [*rows, *means(rows)])
    for row in means(rows):
        print(json.dumps(row))


def measured(asked: argparse.Namespace, seed: int) -> list[dict[str, Any]]:
    """The FD and class accuracy of the ensemble and of every student of one seed, at every guidance."""
    work = asked.work.resolve() / str(seed)
    atoll("demo", "--out", work / "run", "--seed", seed, "--size", asked.size)
    (asked.work / "prompts.txt").write_text("\n".join(PROMPTS) + "\n")
    students = []
    for way in asked.only:
        more = ["--prompts", asked.work / "prompts.txt"] if way == "from-samples" else []
        atoll("distill", work / "run", "--out", work / way, "--seed", seed, "--device", "cpu", *WAYS[way], *more)
        students += ["--student", work / way]
    how = [word for guidance in GUIDANCES for word in ("--guidance", guidance)]
    how += ["--route", "top-1", "-n", asked.n, "--threads", 1, "--device", "cpu", "--out", work / "compared"]
    atoll("evaluate", work / "run", *students, *how)
    evaluation = json.loads((work / "compared" / "evaluation.json").read_bytes())
    found = {row["name"]: row["scores"]["pixels"] for row in evaluation["configurations"]}
    rows = []
    for guidance in GUIDANCES:
        ensemble = found[f"top-1-g{guidance}"]
        for name in ("top-1", *(f"student-{way}" for way in asked.only)):
            scores = found[f"{name}-g{guidance}"]
            rows.append(
                {
                    "what": name,
                    "guidance": guidance,
                    "seed": seed,
                    "fd": scores["fd"]["value"],
                    "class_accuracy": scores["class_accuracy"]["value"],
                    "fd_ratio": scores["fd"]["value"] / ensemble["fd"]["value"],
                }
            )
    return rows


def means(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The mean ratio over seeds of each student at each guidance, and its standard deviation."""
    groups: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        if row["what"] != "top-1":
            groups.setdefault((row["what"], row["guidance"]), []).append(row["fd_ratio"])
    return [
        {
            "what": f"{name}, mean over seeds",
            "guidance": guidance,
            "seeds": len(ratios),
            "fd_ratio": mean(ratios),
            "fd_ratio_deviation": stdev(ratios) if len(ratios) > 1 else 0.0,
        }
        for (name, guidance), ratios in groups.items()
    ]


def atoll(*words: object) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment.setdefault("PYTHONPATH", str(ROOT / "src"))
    subprocess.run([sys.executable, "-m", "atoll", *map(str, words)], env=environment, check=True)


if __name__ == "__main__":
    main()
