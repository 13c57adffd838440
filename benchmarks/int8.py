"""Do weights in eight bits paint as well? An ensemble in float32, bfloat16 and int8, measured on its data.

    atoll demo --out runs/demo
    PYTHONPATH=src python3 benchmarks/int8.py runs/demo --out benchmarks/results/int8-demo.json
    PYTHONPATH=src python3 benchmarks/int8.py runs/photos --count 200 --steps 25 --out int8-photographs.json

Every arm paints the same prompts from the same noise (the evaluation's), and is measured like the demo's arms: Frechet
distance to the real digits, share recognised. Beside it: how many images differ visibly from float32's, by a pixel that
is off by more than 16 of 255.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import torch

import atoll
from atoll import Sampling
from atoll.artifacts import Artifact, Store
from atoll.evaluation.real import RealData
from atoll.sampling import image_seeds
from provenance import commit

ARMS: dict[str, dict[str, Any]] = {
    "float32": {"precision": "float32"},
    "bfloat16": {"precision": "bfloat16"},
    "int8": {"precision": "float32", "weights": "int8"},
    "int8, bfloat16": {"precision": "bfloat16", "weights": "int8"},
}
VISIBLE = 16  # of 255


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--count", type=int, default=1000, help="images of an arm")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="first seed; one set of images for each")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    run = Store.at(arguments.run)
    data = Artifact.open(run.child("data"), "data")
    digits = data.config["features"]["extractor"] == "pixels"  # measured by ink, from 0 to 16
    real = RealData(data, scale=16.0 if digits else 1.0, count=arguments.count)
    prompts, wanted = real.prompts(arguments.count)
    rows = []
    for route in ("top-1", "top-2"):
        for seed in arguments.seeds:
            exact = None
            for name, how in ARMS.items():
                model = atoll.load(arguments.run, device="cpu", weights=how.get("weights"))
                sampling = Sampling(route=route, precision=how["precision"], steps=arguments.steps)
                latents = model.latents(prompts, image_seeds(seed, len(prompts)), sampling, batch=500)
                images = model.decode(latents)
                exact = images if exact is None else exact
                off = (images.int() - exact.int()).abs().flatten(1).amax(1)
                row = {"route": route, "seed": seed, "arm": name, **real.measure(images, wanted)}
                row["visibly_different"] = (off > VISIBLE).float().mean().item()
                rows.append(row)
                print(json.dumps(row), flush=True)
    ratios = {}
    for name in ARMS:
        pairs = [
            (row["frechet"], plain["frechet"])
            for row in rows
            for plain in rows
            if row["arm"] == name and plain["arm"] == "float32"
            if (row["route"], row["seed"]) == (plain["route"], plain["seed"])
        ]
        ratios[name] = [round(mine / theirs, 4) for mine, theirs in pairs]
    record = {
        "commit": commit(),
        "hardware": f"{os.cpu_count()} CPU cores, one thread",
        "count": arguments.count,
        "floors": real.floors(arguments.count),
        "frechet_against_float32": ratios,
        "arms": rows,
    }
    arguments.out.write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(ratios, indent=1))


if __name__ == "__main__":
    main()
