"""Speed of `prepare` against an older commit, both in one run, in turns; and the bytes that both write.

    git worktree add /tmp/old 3167457
    python benchmarks/prepare.py ~/clothes --old /tmp/old --rounds 3

Prints a table and appends its rows to benchmarks/results/prepare.csv. Images per second count from the command to its
end. Bytes are those of all write calls of all processes, counted by strace (--bytes), over the size of data/.
"""

from __future__ import annotations

import argparse
import csv
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "prepare.csv"
RUN = """
import sys
from pathlib import Path
source, out, autoencoder, size, workers = sys.argv[1:]
if __name__ == "__main__":
    from atoll.data.prepare import PrepareConfig, prepare
    config = PrepareConfig(size=int(size), autoencoder=autoencoder, features="efficientnet-lite0")
    try:
        from atoll.executor import Executor
        prepare(source, out, config, executor=Executor(int(workers)))
    except ImportError:
        from atoll.data.engine import Local
        prepare(source, out, config, engine=Local(int(workers)))
"""
WRITES = re.compile(r"\b(?:write|pwrite64|writev|sendfile|copy_file_range)\(\d+<(/[^>]*)>.*= (\d+)$", re.M)


def run(
    code: Path, source: str, out: Path, autoencoder: str, size: int, workers: int, trace: bool
) -> tuple[float, int]:
    """Seconds of one run, and bytes written to files below the folder of `out` (0 without `trace`)."""
    script = out.parent / "run.py"
    script.write_text(RUN)
    command = [sys.executable, str(script), source, str(out), autoencoder, str(size), str(workers)]
    log = out.parent / "strace"
    if trace:
        calls = "write,pwrite64,writev,sendfile,copy_file_range"
        command = ["strace", "-f", "-y", "-e", f"trace={calls}", "-o", str(log), *command]
    environment = {**os.environ, "PYTHONPATH": str(code / "src"), "OMP_NUM_THREADS": "1"}
    began = time.monotonic()
    subprocess.run(command, check=True, env=environment)
    seconds = time.monotonic() - began
    if not trace:
        return seconds, 0
    found = WRITES.findall(log.read_text(errors="replace"))
    return seconds, sum(int(count) for path, count in found if path.startswith(str(out.parent)))


def tensors(data: Path) -> dict[str, np.ndarray]:
    """{id: normalized latent and feature, one after another} of a data artifact, read without atoll."""
    import json

    import pyarrow.parquet as pq
    from safetensors.numpy import load_file

    space = json.loads((data / "manifest.json").read_text())["config"]["latent"]
    old = (data / "shards").is_dir()
    paths = sorted((data / "shards").iterdir() if old else data.glob("shard-*"))
    shards = [load_file(path) for path in paths]
    mean, scale = (np.array(space[name])[:, None, None] for name in ("mean", "std" if old else "scale"))
    found = {}
    for row in pq.read_table(data / "index.parquet", columns=["id", "shard", "row"]).to_pylist():
        shard = shards[row["shard"]]
        latent = shard["latents"][row["row"]]
        latent = latent * scale + mean if old else latent
        found[row["id"]] = np.concatenate([latent.ravel(), shard["features"][row["row"]]])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source")
    parser.add_argument("--old", type=Path, required=True, help="work tree of the older commit")
    parser.add_argument("--autoencoders", nargs="+", default=["taef2", "dct-4"])
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--bytes", action="store_true", help="count bytes with strace, in one more run")
    arguments = parser.parse_args()
    trees = {"old": arguments.old, "new": ROOT}
    rows = []
    for autoencoder in arguments.autoencoders:
        seconds: dict[str, list[float]] = {name: [] for name in trees}
        ratio, difference, count = dict.fromkeys(trees, 0.0), 0.0, 0
        for number in range(arguments.rounds + arguments.bytes):
            made: dict[str, dict[str, np.ndarray]] = {}
            traced = number == arguments.rounds
            for name, tree in trees.items():
                folder = Path(tempfile.mkdtemp())
                out = folder / "data"
                took, written = run(tree, arguments.source, out, autoencoder, arguments.size, arguments.workers, traced)
                if traced:
                    ratio[name] = written / sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
                else:
                    seconds[name].append(took)
                if number == 0:
                    made[name] = tensors(out)
                shutil.rmtree(folder)
            if made:
                count = len(made["new"])
                assert made["new"].keys() == made["old"].keys()
                difference = max(float(np.abs(made["new"][i] - made["old"][i]).max()) for i in made["new"])
        for name in trees:
            speed, old = count / np.median(seconds[name]), count / np.median(seconds["old"])
            row = {"autoencoder": autoencoder, "commit": name, "images": count, "images_per_s": round(speed, 1)}
            row |= {"ratio": round(speed / old, 3), "bytes_over_size": round(ratio[name], 3)}
            rows.append({**row, "largest_difference": difference})
            print("  ".join(f"{key} {value}" for key, value in rows[-1].items()), flush=True)
    is_new = not RESULTS.exists()
    with RESULTS.open("a", newline="") as file:
        writer = csv.DictWriter(file, rows[0].keys())
        if is_new:
            writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
