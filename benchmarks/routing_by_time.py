"""What routing does by t in a finished run: how sure the router is, how often right, and when images change expert.

    python benchmarks/routing_by_time.py runs/photos --out benchmarks/results/routing-photographs.json
    python benchmarks/routing_by_time.py --figure docs/routing.svg benchmarks/results/routing-photographs.json

Images are painted at guidance 1, so that every step asks the router once for each image. The record has, by time:

    sure        mean of the largest weight the router gives
    experts     exp of the mean entropy of its weights: among how many experts it hesitates
    changed     share of images whose most likely expert is another than a step before
    settled     share of images whose most likely expert is already the one at the end
    right       share of real images whose cluster it names, of those it has not seen; and the same without the prompt
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import matplotlib
import torch
from matplotlib.figure import Figure
from torch import Tensor

import atoll
from atoll.artifacts import Store
from atoll.ensemble.versions import open_ensemble, open_reference
from atoll.evaluation.real import RealData
from atoll.evaluation.sheet import INK, RULE, expert_color
from atoll.sampling import Sampling, image_seeds
from provenance import commit


def painted_weights(run: Path, count: int, steps: int, route: str) -> tuple[list[float], Tensor]:
    """The times of the steps, and the router's weights there [T, N, K]; prompts of the data in turn."""
    store = Store.at(run)
    version = open_ensemble(store)
    prompts, _ = RealData(open_reference(store, version.data, "data"), 1.0).prompts(count)
    seen: dict[float, Tensor] = {}

    def watch(rows: slice | Tensor, t: Tensor, weights: Tensor, chosen: Tensor) -> None:
        place = seen.setdefault(round(float(t[0]), 9), torch.zeros(count, weights.shape[1]))
        place[rows] = weights.float().cpu()

    sampling = Sampling(steps=steps, solver="euler", guidance=1.0, route=route)
    atoll.load(run, device="cpu").latents(prompts, image_seeds(0, count), sampling, batch=128, watch=watch)
    times = sorted(seen, reverse=True)
    return times, torch.stack([seen[t] for t in times])


def measured(times: list[float], weights: Tensor) -> dict[str, Any]:
    """The record's numbers by time, from noise to data, of the router's weights [T, N, K]."""
    likeliest = weights.argmax(2)
    entropy = -(weights * weights.clamp(min=1e-12).log()).sum(2)
    differs = likeliest[1:] != likeliest[:-1]
    return {
        "t": times,
        "sure": weights.amax(2).mean(1).tolist(),
        "experts": entropy.mean(1).exp().tolist(),
        "changed": [0.0, *differs.float().mean(1).tolist()],
        "settled": (likeliest == likeliest[-1]).float().mean(1).tolist(),
        "changes_per_image": differs.sum(0).float().mean().item(),
        "never_changed": (~differs.any(0)).float().mean().item(),
    }


def record(run: Path, count: int, steps: int, route: str) -> dict[str, Any]:
    version = open_ensemble(Store.at(run))
    assert version.router is not None, "a run without a router has nothing to look at"
    router = json.loads(open_reference(Store.at(run), version.router, "router").read("accuracy.json"))
    data = open_reference(Store.at(run), version.data, "data")
    return {
        "commit": commit(),
        "hardware": f"{os.cpu_count()} CPU cores, one thread",
        "model": version.model_digest(),
        "experts": version.clusters,
        "training_images": data.config["splits"]["train"],
        "sampling": {"images": count, "seeds": [0, count - 1], "steps": steps, "route": route, "guidance": 1.0},
        "painted": measured(*painted_weights(run, count, steps, route)),
        "right": {key: router[key] for key in ("t", "accuracy", "accuracy_unconditional")},
    }


def draw(made: dict[str, Any], path: Path) -> None:
    """Three panels, each from noise on the left to data on the right."""
    figure = Figure(figsize=(11.0, 3.2), layout="constrained")
    panels = figure.subplots(1, 3)
    painted, right, experts = made["painted"], made["right"], made["experts"]
    first, second = expert_color(0), expert_color(4)
    panels[0].plot(right["t"], right["accuracy"], color=first, label="sees the prompt")
    panels[0].plot(right["t"], right["accuracy_unconditional"], color=second, ls="--", label="prompt dropped")
    panels[0].set_title("Real images: right cluster named")
    panels[1].plot(painted["t"], painted["experts"], color=first)
    panels[1].set(title=f"While painting: experts it hesitates among, of {experts}", ylim=(1, experts))
    panels[2].plot(painted["t"], painted["settled"], color=first, label="has its last expert already")
    panels[2].plot(painted["t"], painted["changed"], color=second, ls="--", label="changes expert at this step")
    panels[2].set_title("While painting: images at top-1")
    for panel in panels:
        panel.invert_xaxis()
        panel.set_xlabel("t, from noise (1) to data (0)", color=INK, fontsize=9)
        panel.title.set(fontsize=10, color=INK)
        panel.tick_params(labelsize=8, colors=INK)
        panel.grid(color=RULE, linewidth=0.6)
        for side in panel.spines.values():
            side.set_visible(False)
    for panel in (panels[0], panels[2]):
        panel.set_ylim(0, 1.02)
        panel.yaxis.set_major_formatter(matplotlib.ticker.PercentFormatter(1.0, decimals=0))
        panel.legend(frameon=False, fontsize=8, labelcolor=INK)
    with matplotlib.rc_context({"svg.fonttype": "none", "font.family": "sans-serif", "svg.hashsalt": "atoll"}):
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None, dpi=130)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", type=Path, help="a run; with --figure a record")
    parser.add_argument("--out", type=Path, help="where the record goes")
    parser.add_argument("--figure", type=Path, help="draw a record: .svg or .png")
    parser.add_argument("--count", type=int, default=512, help="images to paint")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--route", default="top-1")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    if asked.figure is not None:
        draw(json.loads(asked.what.read_bytes()), asked.figure)
    else:
        made = record(asked.what, asked.count, asked.steps, asked.route)
        text = json.dumps(made, indent=1)
        print(text) if asked.out is None else asked.out.write_text(text + "\n")
