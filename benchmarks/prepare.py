"""Speed of `prepare` against an older commit, both in one run, in turns; the bytes that are written; and its memory.

    git worktree add --detach /tmp/old 3167457
    python benchmarks/prepare.py speed ~/clothes --old /tmp/old --rounds 5
    python benchmarks/prepare.py bytes ~/clothes          # by strace over all processes, partition included
    python benchmarks/prepare.py memory                   # of generated images, 10,000 and 100,000

Prints rows and appends them to benchmarks/results/prepare.csv. Images per second count from the start of the process to
its end. Memory is the largest resident size of the main process and of any of its workers, in MiB.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import platform
import re
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
from PIL import Image
from safetensors.numpy import load_file

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "prepare.csv"
COLUMNS = ["what", "commit", "settings", "images", "value", "unit", "against", "date", "hardware", "command"]
RUN = """
import resource, sys
source, out, autoencoder, features, size, workers = sys.argv[1:]
if __name__ == "__main__":
    from atoll.data.prepare import prepare
    try:
        from atoll.data.config import PrepareConfig
        from atoll.executor import Executor
        how = {"executor": Executor(int(workers))}
    except ImportError:  # commit 3167457
        from atoll.data.engine import Local
        from atoll.data.prepare import PrepareConfig
        how = {"engine": Local(int(workers))}
    prepare(source, out, PrepareConfig(size=int(size), autoencoder=autoencoder, features=features), **how)
    print(*(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)))
"""
PARTITION = ["-m", "atoll", "partition", "data", "-k", "8"]
WRITES = re.compile(r"\b(?:write|pwrite64|writev|sendfile|copy_file_range)\(\d+<(/[^>]*)>.*= (\d+)$", re.M)


def run(code: Path, folder: Path, *arguments: str, trace: bool = False) -> tuple[float, str, int]:
    """Seconds of a Python process, what it printed, and with `trace` the bytes it wrote to files below its folder."""
    command, log = [sys.executable, *arguments], folder / "strace"
    if trace:
        calls = "write,pwrite64,writev,sendfile,copy_file_range"
        command = ["strace", "-f", "-y", "-e", f"trace={calls}", "-o", str(log), *command]
    environment = {**os.environ, "PYTHONPATH": str(code / "src"), "OMP_NUM_THREADS": "1"}
    began = time.monotonic()
    done = subprocess.run(command, check=True, env=environment, cwd=folder, stdout=subprocess.PIPE, text=True)
    seconds = time.monotonic() - began
    found = WRITES.findall(log.read_text(errors="replace")) if trace else []
    return seconds, done.stdout, sum(int(count) for path, count in found if path.startswith(f"{folder}/"))


def tensors(data: Path) -> dict[str, np.ndarray]:
    """{id: the autoencoder's latent and the feature, one after another} of a data artifact, read without atoll."""
    space = json.loads((data / "manifest.json").read_text())["config"]["latent"]
    old = (data / "shards").is_dir()  # normalized latents
    shards = [load_file(path) for path in sorted((data / "shards").iterdir() if old else data.glob("shard-*"))]
    found = {}
    for row in pq.read_table(data / "index.parquet", columns=["id", "shard", "row"]).to_pylist():
        latent = shards[row["shard"]]["latents"][row["row"]]
        if old:
            latent = latent * np.array(space["std"])[:, None, None] + np.array(space["mean"])[:, None, None]
        found[row["id"]] = np.concatenate([latent.ravel(), shards[row["shard"]]["features"][row["row"]]])
    return found


def speed(arguments: argparse.Namespace) -> list[list[object]]:
    rows: list[list[object]] = []
    for autoencoder in arguments.autoencoders:
        seconds: dict[Path, list[float]] = {arguments.old: [], ROOT: []}
        for number in range(arguments.rounds):
            made = {}
            for tree in seconds if number % 2 else reversed(seconds):
                with tempfile.TemporaryDirectory() as name:
                    folder = Path(name)
                    (folder / "run.py").write_text(RUN)
                    settings = (autoencoder, "efficientnet-lite0", "64", str(arguments.workers))
                    took, _, _ = run(tree, folder, "run.py", str(arguments.source.resolve()), "data", *settings)
                    seconds[tree].append(took)
                    cpu = resource.getrusage(resource.RUSAGE_CHILDREN)
                    print(f"{autoencoder} {tree.name} {took:.1f} s, {cpu.ru_utime + cpu.ru_stime:.0f} s of CPU so far")
                    if number == 0:
                        made[tree] = tensors(folder / "data")
            if made:
                old, new = made[arguments.old], made[ROOT]
                assert old.keys() == new.keys(), "the same images"
                count, difference = len(new), max(float(np.abs(new[i] - old[i]).max()) for i in new)
        name, workers = f"{autoencoder}, EfficientNet-Lite0, 64 px", arguments.workers
        rates = {tree: count / float(np.median(took)) for tree, took in seconds.items()}
        for tree, rate in rates.items():
            note = f"{rate / rates[arguments.old]:.2f} x; largest difference {difference:.1e}" if tree == ROOT else ""
            commit = commit_of(tree)
            rows.append(["speed", commit, f"{name}, {workers} workers", count, f"{rate:.1f}", "images/s", note])
    return rows


def written(arguments: argparse.Namespace) -> list[list[object]]:
    rows: list[list[object]] = []
    for autoencoder in arguments.autoencoders:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            (folder / "run.py").write_text(RUN)
            settings = (autoencoder, "efficientnet-lite0", "64", str(arguments.workers))
            _, _, first = run(ROOT, folder, "run.py", str(arguments.source.resolve()), "data", *settings, trace=True)
            _, _, second = run(ROOT, folder, *PARTITION, trace=True)
            size = sum(path.stat().st_size for path in (folder / "data").rglob("*") if path.is_file())
            count = json.loads((folder / "data" / "manifest.json").read_text())["config"]["count"]
        for what, total in (("prepare", first), ("prepare and partition", first + second)):
            text = f"{total / size:.3f}"
            rows.append(["bytes", commit_of(ROOT), f"{autoencoder}, {what}", count, text, "x size of data/", ""])
    return rows


def memory(arguments: argparse.Namespace) -> list[list[object]]:
    rows: list[list[object]] = []
    for count in arguments.counts:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            (folder / "run.py").write_text(RUN)
            for number in range(count):
                place = folder / "images" / f"{number // 1000:03d}"
                place.mkdir(parents=True, exist_ok=True)
                pixels = np.random.default_rng(number).integers(0, 256, (8, 8, 3), np.uint8)
                Image.fromarray(pixels).save(place / f"{number:06d}.png")
            _, printed, _ = run(
                ROOT, folder, "run.py", "images", "data", "pixels", "pixels", "8", str(arguments.workers)
            )
        for process, kib in zip(("main process", "largest worker"), printed.split(), strict=True):
            rows.append(["memory", commit_of(ROOT), f"pixels, 8 px, {process}", count, int(kib) // 1024, "MiB", ""])
    return rows


def commit_of(tree: Path) -> str:
    return subprocess.check_output(["git", "-C", str(tree), "rev-parse", "--short=7", "HEAD"], text=True).strip()


def hardware() -> str:
    found = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    return f"{os.cpu_count()} cores {found[1] if found else platform.machine()}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("speed", "bytes", "memory"))
    parser.add_argument("source", type=Path, nargs="?")
    parser.add_argument("--old", type=Path, help="work tree of the older commit")
    parser.add_argument("--autoencoders", nargs="+", default=["taef2", "dct-4"])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--counts", type=int, nargs="+", default=[10_000, 100_000])
    arguments = parser.parse_args()
    rows = {"speed": speed, "bytes": written, "memory": memory}[arguments.what](arguments)
    is_new, command = not RESULTS.exists(), " ".join(["python", *sys.argv])
    with RESULTS.open("a", newline="") as file:
        writer = csv.writer(file)
        if is_new:
            writer.writerow(COLUMNS)
        for row in rows:
            print(*row, sep="  ")
            writer.writerow([*row, time.strftime("%Y-%m-%d"), hardware(), command])


if __name__ == "__main__":
    main()
