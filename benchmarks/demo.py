"""How long the demo takes and what it reaches, from an empty folder, for one or more seeds.

    python benchmarks/demo.py --out benchmarks/results/demo.csv [--seeds 0 1 2]
    python benchmarks/demo.py --against 290f597 --rounds 2 --out benchmarks/results/demo-loop.csv

Each seed runs `atoll demo`, the same again (everything is there), and, unless `--no-compare`, `atoll demo --compare`,
each as a command of its own, and keeps the evaluation. Seconds depend on the machine and on who else uses it: the load
before the run is recorded beside them.

`--against COMMIT` runs the demo of this tree and of another commit in turns, the first turn swapped every round, on the
same seeds, and sums up both: mean seconds and their ratio, the Frechet distance and recognised share of every arm.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import platform
import resource
import subprocess
import sys
import tarfile
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from records import scores_of, write_record

HERE = Path(__file__).resolve().parent.parent
KEPT = ("class_accuracy", "fd", "nearest")


@dataclass(frozen=True)
class Tree:
    """A version of the program: `commit` says which, `source` is the folder its package lies in."""

    name: str
    commit: str
    source: Path


@dataclass(frozen=True)
class Spent:
    """Seconds on the wall, and of processors, which other users of the machine change less."""

    wall: float
    cpu: float


@dataclass(frozen=True)
class Settings:
    size: str
    compare: bool


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--rounds", type=int, default=1, help="how often to run everything")
    parser.add_argument("--against", metavar="COMMIT", help="run the demo of this commit too, in turns with ours")
    parser.add_argument("--compare", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--size", choices=["demo", "tiny"], default="demo", help="tiny: to see that this script works")
    parser.add_argument("--work", type=Path, help="keep the runs below this folder")
    arguments = parser.parse_args()
    settings = Settings(arguments.size, arguments.compare)
    with tempfile.TemporaryDirectory() as temporary:
        work = (arguments.work or Path(temporary)).resolve()
        trees = [Tree("here", commit_of("HEAD") + changed(), HERE / "src")]
        if arguments.against is not None:
            trees.append(unpacked(arguments.against, Path(temporary) / "there"))
        runs = []
        for turn in range(arguments.rounds):
            for seed in arguments.seeds:
                for tree in trees if turn % 2 == 0 else trees[::-1]:
                    print(f"round {turn}, seed {seed}, {tree.name} ({tree.commit[:12]})", file=sys.stderr, flush=True)
                    folder = work / f"{tree.name}-round-{turn}-seed-{seed}"
                    runs.append({"tree": tree.name, "round": turn, **measure(tree, folder, seed, settings)})
    record: dict[str, Any] = {
        "command": " ".join(["python benchmarks/demo.py", *sys.argv[1:]]),
        "machine": {"cores": os.cpu_count(), "machine": platform.machine(), "python": platform.python_version()},
        "commits": {tree.name: tree.commit for tree in trees},
    }
    if arguments.against is not None:
        record["summary"] = summary(runs)
    write_record(arguments.out, {**record, "runs": runs})
    shown = [record["summary"]] if "summary" in record else [without_arms(run) for run in runs]
    print("\n".join(json.dumps(item, indent=1) for item in shown))


def commit_of(name: str) -> str:
    return git("rev-parse", "--verify", f"{name}^{{commit}}").decode().strip()


def changed() -> str:
    """A word for a tree that is no longer what its commit says."""
    return " with changes" if git("status", "--porcelain", "--", "src") else ""


def unpacked(name: str, folder: Path) -> Tree:
    """The package as it was at a commit, in `folder`."""
    commit = commit_of(name)
    with tarfile.open(fileobj=io.BytesIO(git("archive", "--format=tar", commit, "src"))) as archive:
        archive.extractall(folder, filter="data")
    return Tree("there", commit, folder / "src")


def git(*arguments: str) -> bytes:
    return subprocess.run(["git", "-C", str(HERE), *arguments], check=True, stdout=subprocess.PIPE).stdout


def measure(tree: Tree, folder: Path, seed: int, settings: Settings) -> dict[str, Any]:
    load = os.getloadavg()[0]
    common = ["--out", str(folder), "--seed", str(seed), "--size", settings.size]
    spent = {"demo": timed(tree, *common), "demo again": timed(tree, *common)}
    if settings.compare:
        spent["compare, after demo"] = timed(tree, *common, "--compare")
    evaluation = json.loads((folder / "evaluation.json").read_bytes())
    return {
        "seed": seed,
        "load_before": load,
        "seconds": {stage: each.wall for stage, each in spent.items()},
        "cpu_seconds": {stage: each.cpu for stage, each in spent.items()},
        "real": evaluation["real"],
        "against_monolith": evaluation["against_monolith"],
        "arms": scores_of(evaluation, *KEPT),
    }


def timed(tree: Tree, *arguments: str) -> Spent:
    began, before = time.monotonic(), cpu_seconds()
    command = [sys.executable, "-m", "atoll", "demo", *arguments]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=environment(tree), cwd=tree.source)
    return Spent(round(time.monotonic() - began, 1), round(cpu_seconds() - before, 1))


def environment(tree: Tree) -> dict[str, str]:
    """In which `import atoll` finds this tree, whatever is installed; checked, since all else hangs on it."""
    variables = {**os.environ, "PYTHONPATH": str(tree.source)}
    ask = [sys.executable, "-c", "import atoll; print(atoll.__file__)"]
    found = subprocess.run(ask, check=True, stdout=subprocess.PIPE, text=True, env=variables, cwd=tree.source).stdout
    assert Path(found.strip()).is_relative_to(tree.source), f"{found.strip()} is not below {tree.source}"
    return variables


def cpu_seconds() -> float:
    """Of all processes this one has started and seen end, and theirs."""
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    return spent.ru_utime + spent.ru_stime


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Both trees side by side, each number the mean over its runs; ratios are ours over theirs."""
    ours, theirs = ([run for run in runs if run["tree"] == name] for name in ("here", "there"))

    def beside(of: Any) -> dict[str, float]:
        here, there = (mean(of(run) for run in some) for some in (ours, theirs))
        return {"here": here, "there": there, "ratio": here / there if there else float("nan")}

    def arm_value(name: str, key: str) -> Any:
        return lambda run: next(arm[key] for arm in run["arms"] if arm["name"] == name)

    return {
        **{
            unit: {stage: beside(lambda run, unit=unit, stage=stage: run[unit][stage]) for stage in ours[0][unit]}
            for unit in ("seconds", "cpu_seconds")
        },
        "arms": {
            arm["name"]: {key: beside(arm_value(arm["name"], key)) for key in ("fd", "class_accuracy")}
            for arm in ours[0]["arms"]
        },
    }


def without_arms(run: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in run.items() if key != "arms"}


if __name__ == "__main__":
    main()
