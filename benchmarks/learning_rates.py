"""Experts of a finished run at other learning rates: the yardstick of each on samples that it has not seen.

    python benchmarks/learning_rates.py RUN --clusters 0 2 --rates 0.002 0.004 --work FOLDER --out RECORD

The run's own expert is the one at the order's rate; the others differ from it in nothing else. Trainings go on where
they were stopped, and a record that is there is added to.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from atoll.islands.order import Order, read_order
from records import commit, write_record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--clusters", type=int, nargs="+", required=True)
    parser.add_argument("--rates", type=float, nargs="+", required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args()
    record: dict[str, Any] = (
        json.loads(asked.out.read_text()) if asked.out.exists() else {"commands": [], "experts": {}}
    )
    record["commands"].append(f"python benchmarks/learning_rates.py {' '.join(sys.argv[1:])}  # {commit()}")
    record["cores"] = os.cpu_count()
    for cluster in asked.clusters:
        order, _ = read_order(str(asked.run / "orders" / f"{cluster:02d}.json"))
        own = {"objective": str(order.objective.kind), "images": order.training.images, "batch": order.training.batch}
        found = record["experts"].setdefault(f"{cluster:02d}", own | {"yardstick": {}})["yardstick"]
        found[f"{order.training.learning_rate:g}"] = last(asked.run / "islands" / f"{cluster:02d}" / "expert")
        for rate in asked.rates:
            found[f"{rate:g}"] = last(trained(asked.run, order, rate, asked.work / f"{cluster}-{rate}"))
            asked.out.write_text(json.dumps(record, indent=1) + "\n")
            print(f"cluster {cluster}: {found}", flush=True)
    write_record(asked.out.with_suffix(".csv"), record)


def trained(run: Path, order: Order, rate: float, out: Path) -> Path:
    """The folder of an expert by this order at another rate."""
    training = order.training.model_copy(update={"learning_rate": rate})
    place = run / "orders-rates" / f"{order.name}-{rate}.json"  # shards are found from a folder of the run
    place.parent.mkdir(exist_ok=True)
    place.write_bytes(Order.model_validate(order.model_copy(update={"training": training}).model_dump()).to_bytes())
    command = [sys.executable, "-m", "atoll", "train", place, "--out", out, "--device", "cpu", "--no-previews"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(list(map(str, command)), check=True, stdout=subprocess.DEVNULL, env=environment)
    return out


def last(expert: Path) -> float:
    """Its error on unseen samples at the end of training."""
    return float(json.loads((expert / "metrics.jsonl").read_text().splitlines()[-1])["val_loss"])


if __name__ == "__main__":
    main()
