"""Does free text work? Paint captions no training has seen, and ask a classifier of the real images what they show.

    python held_out.py RUN --count 1000     # of each kind: other templates, other names, descriptions without a name

Writes RUN/held_out.json. `class_accuracy` has its 95 % interval; `chance` is what guessing among all classes would
get right, `real` what the classifier gets right on real images it has not seen. The rest says what was measured.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

import atoll
from atoll.artifacts import Store, write_atomic
from atoll.evaluation.real import RealData
from atoll.registry.versions import open_ensemble, open_reference
from atoll.sampling import Sampling, image_seeds

KINDS = {"template": "other templates", "synonym": "other names", "paraphrase": "descriptions without the name"}


def main(run: Path, count: int, steps: int, guidance: float, device: str | None) -> None:
    lines: list[dict[str, Any]] = json.loads((run / "source" / "held_out.json").read_bytes())
    version = open_ensemble(Store.at(run))
    model = atoll.load(run, device=device)
    real = RealData(open_reference(Store.at(run), version.data, "data"), str(model.device))
    sampling = model.resolved(Sampling(steps=steps, guidance=guidance))
    found: dict[str, Any] = {
        "count": count,
        "seeds": [0, count - 1],
        "sampling": asdict(sampling),
        "model": model.digest,
        "data": version.data.digest,
        "extractor": real.extractor,
        "real": real.baseline()["class_accuracy"].value,
    }
    chance = 1.0 / len(real.real.labels[real.real.labels >= 0].unique())
    for kind, title in KINDS.items():
        asked = [line for line in lines if line["kind"] == kind]
        if not asked:
            continue
        chosen = [asked[i % len(asked)] for i in range(count)]
        latents = model.latents([line["caption"] for line in chosen], image_seeds(0, count), sampling, batch=250)
        labels = np.array([line["label"] for line in chosen])
        prompts = [line["caption"] for line in chosen]
        right = real.measure(model.decode(latents), prompts, labels)["class_accuracy"]
        found[kind] = {
            "class_accuracy": right.value,
            "interval": [right.low, right.high],
            "chance": chance,
            "captions": len(asked),
        }
        print(
            f"{title}: {right.value:.1%} classified as asked for ({right.low:.1%} to {right.high:.1%}), "
            f"{chance:.1%} by chance ({len(asked)} captions, {count} images)"
        )
    write_atomic(run / "held_out.json", json.dumps(found, indent=1).encode() + b"\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Whether a model understands captions that no training has seen")
    parser.add_argument("run", type=Path)
    parser.add_argument("--count", type=int, default=1000, help="images of each kind")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--guidance", type=float, default=2.0)
    parser.add_argument("--device")
    asked = parser.parse_args()
    torch.set_grad_enabled(False)
    main(asked.run, asked.count, asked.steps, asked.guidance, asked.device)
