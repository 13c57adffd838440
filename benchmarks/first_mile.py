"""`atoll run` on 3,000 photographs of 32 px: seconds and peak memory of every stage, and whether prompts are followed.

    python benchmarks/first_mile.py --out benchmarks/results/first-mile-2-cores.csv [--hours 0.5] [--images 3000]
    python benchmarks/first_mile.py --source ../shared/datasets/tiny-imagenet --classes 8 --hours 0.5 --out ...
    python benchmarks/first_mile.py --work WORK --students 0 0.5 --out ...   # of a run that is there, beside it

Pictures are generated (support/photographs.py), or taken from parquet files with columns `image` and `label` and put
into class folders. Each stage is a command of its own, `atoll run ... --until STAGE`, so that it can be told from the
stages before it. With --students, one dense network is distilled of the model with each of these data weights
and measured on the same noise; the record is then of those. Memory is the sum over all processes of a stage of what
each has to itself (PSS), looked at every half second; the largest sum counts. Seconds hold the start of the program,
and depend on who else uses the machine: the load before each stage is recorded.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import platform
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from records import scores_of, write_record

HERE = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(HERE / "tests" / "support"))

STAGES = ("prepare", "partition", "plan", "train", "admit", "router", "evaluate")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--hours", type=float, default=0.5)
    parser.add_argument("--images", type=int, default=3000)
    parser.add_argument("--size", type=int, default=32)
    parser.add_argument("--source", type=Path, help="a folder of parquet files; default: generated photographs")
    parser.add_argument("--classes", type=int, default=8)
    parser.add_argument("--work", type=Path, help="keep album and run here; an unfinished one is gone on with")
    parser.add_argument("--students", type=float, nargs="+", metavar="TRUTH", help="of the finished run in --work")
    arguments = parser.parse_args()
    if arguments.students:
        if arguments.work is None:
            parser.error("--students needs --work with a finished run")
        write_record(arguments.out, students(arguments.work.resolve(), arguments.students))
        return
    with tempfile.TemporaryDirectory() as temporary:
        work = (arguments.work or Path(temporary)).resolve()
        pictures = work / "album"
        if not pictures.exists():
            make_album(pictures, arguments.images, arguments.classes, arguments.source)
        stages = []
        for stage in STAGES:
            print(stage, file=sys.stderr, flush=True)
            stages.append(measured(stage, pictures, work / "run", arguments.hours, arguments.size))
        record = {
            "images": sum(1 for _ in pictures.rglob("*.jpg")),
            "stages": stages,
            "seconds": round(sum(stage["seconds"] for stage in stages), 1),
            "peak_gib": max(stage["peak_gib"] for stage in stages),
            **results(work / "run", arguments.classes),
        }
        keep(arguments.out, record)


def keep(out: Path, found: dict[str, Any]) -> None:
    record = {
        "command": " ".join(["python benchmarks/first_mile.py", *sys.argv[1:]]),
        "machine": {"cores": os.cpu_count(), "machine": platform.machine(), "python": platform.python_version()},
        **found,
    }
    write_record(out, record)
    print(json.dumps(record, indent=1))


def students(work: Path, shares: list[float]) -> dict[str, Any]:
    """Students of the run in `work`, and what they and the ensemble's top-1 paint from the same noise."""
    run, made = work / "run", [work / f"student-{share:g}" for share in shares]
    for share, student in zip(shares, made, strict=True):
        atoll("distill", run, "--out", student, "--data-weight", share)
    compared = [word for student in made for word in ("--student", student)]
    ways = ["--route", "top-1", "--guidance", 1, "--guidance", 2, "--steps", 25, "-n", 1000, "--batch", 50]
    atoll("evaluate", run, *compared, *ways, "--out", work / "beside-students")
    evaluation = json.loads((work / "beside-students" / "evaluation.json").read_bytes())
    return {
        "students": {s.name: json.loads((s / "distillation.json").read_bytes()) for s in made},
        "configurations": scores_of(evaluation, "class_accuracy", "fd"),
    }


def atoll(*words: object) -> None:
    environment = {**os.environ, "PYTHONPATH": str(HERE / "src")}
    subprocess.run([sys.executable, "-m", "atoll", *map(str, words)], env=environment, check=True)


def make_album(folder: Path, count: int, classes: int, source: Path | None) -> None:
    """Class folders of JPEG files."""
    if source is None:
        from photographs import MORE_CLASSES, write_photographs

        write_photographs(folder, MORE_CLASSES[:classes], per_class=count // classes, size=40)
        return
    import pyarrow.parquet as pq
    from PIL import Image

    made: dict[int, int] = {}
    for path in sorted(source.glob("train-*.parquet")):
        for row in pq.read_table(path, columns=["image", "label"]).to_pylist():
            label = int(row["label"])
            if (label not in made and len(made) == classes) or made.get(label, 0) >= count // classes:
                continue
            made[label] = made.get(label, 0) + 1
            place = folder / f"class-{label:03d}" / f"{made[label]:05d}.jpg"
            place.parent.mkdir(parents=True, exist_ok=True)
            content = row["image"]["bytes"] if isinstance(row["image"], dict) else row["image"]
            Image.open(io.BytesIO(content)).convert("RGB").save(place, quality=95)


def measured(stage: str, pictures: Path, run: Path, hours: float, size: int) -> dict[str, Any]:
    """Run one stage on top of those before it."""
    command = [sys.executable, "-m", "atoll", "run", str(pictures), "--out", str(run), "--until", stage]
    command += ["--hours", str(hours), "--size", str(size)]
    environment = {**os.environ, "PYTHONPATH": str(HERE / "src"), "OMP_NUM_THREADS": "1"}
    load, began = os.getloadavg()[0], time.monotonic()
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    peak, ended = [0.0], threading.Event()

    def watch() -> None:
        while not ended.wait(0.5):
            peak[0] = max(peak[0], memory_gib(process.pid))

    watcher = threading.Thread(target=watch)
    watcher.start()
    told = process.communicate()[0]
    ended.set()
    watcher.join()
    if process.returncode != 0:
        raise SystemExit(f"{stage} failed")
    return {
        "stage": stage,
        "seconds": round(time.monotonic() - began, 1),
        "peak_gib": round(peak[0], 3),
        "load_before": load,
        "told": told.splitlines() if stage == STAGES[-1] else [],
    }


def memory_gib(root: int) -> float:
    """Of a process and all below it, without counting what they share twice."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except (OSError, IndexError):
                continue  # it ended while we looked
            children.setdefault(parent, []).append(int(entry.name))
    total, waiting = 0, [root]
    while waiting:
        one = waiting.pop()
        waiting += children.get(one, [])
        try:
            lines = Path(f"/proc/{one}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        total += next((int(line.split()[1]) for line in lines if line.startswith("Pss:")), 0)
    return total / 2**20


def results(run: Path, classes: int) -> dict[str, Any]:
    evaluation = json.loads((run / "evaluation.json").read_bytes())
    found = scores_of(evaluation, "class_accuracy", "fd")
    accuracy = json.loads((run / "router" / "accuracy.json").read_bytes())["accuracy"]
    return {
        "chance": 1 / classes,
        "class_accuracy": max(row["class_accuracy"] or 0.0 for row in found),
        "class_accuracy_of_real": evaluation["real"][evaluation["features"][0]]["class_accuracy"]["value"],
        "samples": evaluation["plan"]["count"],
        "router_accuracy": sum(accuracy) / len(accuracy),
        "configurations": found,
        "settings": (run / "run.toml").read_text().splitlines(),
    }


if __name__ == "__main__":
    main()
