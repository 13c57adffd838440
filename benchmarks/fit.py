"""Speed of `fit` on the CPU, one thread: against an older tree, and against its own bare step.

    git worktree add ../before 3167457 && python benchmarks/fit.py --before ../before

For networks of 1M and 3M weights: interleaved pairs of processes, the medians of their images per CPU second and of the
ratio of each pair. The bare step is forward, backward and AdamW on one batch, without averaging, clipping and data.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

HERE = Path(__file__).resolve().parents[1]
SIZES = {"1M": {"width": 128, "depth": 4, "heads": 4}, "3M": {"width": 192, "depth": 6, "heads": 6}}
LATENT, BATCH, STEPS, SKIPPED = (4, 8, 8), 32, 60, 10


def images_per_s(size: str, bare: bool) -> float:
    """In this process, with the tree that PYTHONPATH names; the first steps do not count."""
    import torch

    from atoll.islands.train import train
    from atoll.models.dit import DiT, DiTConfig
    from atoll.training.resources import Resources
    from tiny_orders import tiny_order

    torch.set_num_threads(1)
    network = DiTConfig(latent=LATENT, patch=2, condition="labels", classes=3, **SIZES[size])
    times: list[float] = []
    if bare:
        from atoll.diffusion import Condition

        model = DiT(network)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        x, t, labels = torch.randn(BATCH, *LATENT), 999 * torch.rand(BATCH), torch.arange(BATCH) % 3
        for _ in range(STEPS):
            optimizer.zero_grad(set_to_none=True)
            (model(x, t, Condition(labels=labels)) - x).square().mean().backward()
            optimizer.step()
            times.append(time.process_time())
    else:
        with tempfile.TemporaryDirectory() as folder:
            order = tiny_order(Path(folder) / "run", network=network, validation=0, images=STEPS * BATCH, batch=BATCH)
            watch = lambda now: None if now.note else times.append(time.process_time())  # noqa: E731
            train(order, Path(folder) / "expert", resources=Resources("cpu"), sheets=False, watch=watch)
    return BATCH * (len(times) - 1 - SKIPPED) / (times[-1] - times[SKIPPED])


def measured(tree: Path, size: str, *more: str) -> float:
    paths = [tree / "src", tree / "tests" / "support", tree / "tests"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(map(str, paths))}
    command = [sys.executable, __file__, "--worker", size, *more]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return float(run.stdout.split()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, help="worktree of the older commit")
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--worker", choices=SIZES)
    parser.add_argument("--bare", action="store_true")
    arguments = parser.parse_args()
    if arguments.worker:
        print(images_per_s(arguments.worker, arguments.bare))
        return
    for size in SIZES:
        others = {"bare step": (HERE, "--bare")} | ({"before": (arguments.before,)} if arguments.before else {})
        for name, (tree, *more) in others.items():
            pairs = [(measured(HERE, size), measured(tree.resolve(), size, *more)) for _ in range(arguments.pairs)]
            ours, theirs = (median(column) for column in zip(*pairs, strict=True))
            ratio = median(one / other for one, other in pairs)
            print(f"{size}: fit {ours:.0f}, {name} {theirs:.0f} images/s: {ratio:.3f}", flush=True)


if __name__ == "__main__":
    main()
