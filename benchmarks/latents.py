"""What to train a small network on: plain pixels or low frequencies of blocks, at equal compute on one core.

    python benchmarks/latents.py ALBUM --out benchmarks/results/latents-2-cores.json [--images 64000] [--sheets FOLDER]

ALBUM is a folder of class folders (benchmarks/first_mile.py --work W leaves one in W/album). For each space one
network of the laptop recipe, conditioned on the class, is trained by the same recipe on all images, with as many
tokens (8 x 8) and the same seed; then measured on samples from the same noise: Frechet distance in the 100 directions
in which the images' features vary most, and how often a linear classifier of real features sees the class asked for.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from atoll.data.space import LatentConfig
from atoll.evaluation.scores.classifier import Classifier
from atoll.evaluation.scores.frechet import FrechetReference
from atoll.islands.expert import ExpertCard, bridged
from atoll.models.autoencoders import load_autoencoder
from atoll.models.dit import DiT, DiTConfig
from atoll.models.feature_extractors import load_extractor
from atoll.planning.recipes import OBJECTIVES, recipe
from atoll.process import Condition, LinearFlow
from atoll.sampling import generate
from provenance import commit
from stacked import Denoising, Pool, train_stack

SIZE, SAMPLES, STEPS, GUIDANCES, DIRECTIONS = 32, 400, 25, (1.0, 2.0, 4.0), 100


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("album", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--spaces", nargs="+", default=["pixels", "dct-4"])
    parser.add_argument("--images", type=int, default=64_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sheets", type=Path, help="a picture of samples for each space, to be written here")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    images, labels = read_album(arguments.album)
    judge = Judge(images, labels)
    found = {name: measured(name, images, labels, judge, arguments) for name in arguments.spaces}
    record = {
        "command": " ".join(["python benchmarks/latents.py", *sys.argv[1:]]),
        "commit": commit(),
        "machine": {"cores": os.cpu_count(), "machine": platform.machine(), "torch": torch.__version__},
        "images": len(images),
        "samples": SAMPLES,
        "steps": STEPS,
        "chance": 1 / len(set(labels.tolist())),
        "spaces": found,
    }
    arguments.out.write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(found, indent=1))


def read_album(album: Path) -> tuple[Tensor, Tensor]:
    """uint8 [N, 3, SIZE, SIZE] and the number of each image's folder."""
    places = [(k, p) for k, folder in enumerate(sorted(album.iterdir())) for p in sorted(folder.glob("*.jpg"))]
    pictures = [
        np.array(Image.open(p).convert("RGB").resize((SIZE, SIZE), Image.Resampling.LANCZOS)) for _, p in places
    ]
    return torch.from_numpy(np.stack(pictures)).permute(0, 3, 1, 2), torch.tensor([k for k, _ in places])


class Judge:
    """Measures images against the real ones."""

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        self.extractor = load_extractor("efficientnet-lite0", "cpu")
        features = self.features(images)
        self.classifier = Classifier.fitted(features, labels, int(labels.max()) + 1)
        self.mean = features.mean(0)
        self.directions = torch.linalg.svd(features - self.mean, full_matrices=False).Vh[:DIRECTIONS].T
        self.reference = FrechetReference.of(((features - self.mean) @ self.directions).numpy())

    @torch.inference_mode()
    def features(self, images: Tensor) -> Tensor:
        return torch.cat([self.extractor.extract(part).float() for part in torch.split(images, 100)])

    def __call__(self, images: Tensor, wanted: Tensor) -> dict[str, float]:
        features = self.features(images)
        seen = (self.classifier.ranked(features)[:, 0] == wanted).float().mean().item()
        distance = self.reference.distances(((features - self.mean) @ self.directions).numpy(), 0, seed=0)[0]
        return {"recognised": round(seen, 4), "frechet": round(distance, 2)}


def measured(name: str, images: Tensor, labels: Tensor, judge: Judge, arguments: argparse.Namespace) -> dict[str, Any]:
    autoencoder = load_autoencoder(name)
    raw = autoencoder.encode(images)
    mean, std = raw.mean((0, 2, 3)), raw.std((0, 2, 3))
    shape = tuple(raw.shape[1:])
    space = LatentConfig(autoencoder=name, shape=shape, mean=tuple(mean.tolist()), std=tuple(std.tolist()))
    plan = recipe("laptop", shape)
    config = DiTConfig(latent=shape, condition="labels", classes=int(labels.max()) + 1, **plan.network.model_dump())
    torch.manual_seed(arguments.seed)
    flow, began = OBJECTIVES["flow"], time.monotonic()
    trained = train_stack(
        [DiT(config)],
        Denoising([flow], config.time_scale),
        Pool((raw - mean[:, None, None]) / std[:, None, None], labels=labels),
        [torch.arange(len(images))],
        plan.training.over(arguments.images),
        seeds=[arguments.seed],
    )
    seconds = time.monotonic() - began
    network = DiT(config)
    network.load_state_dict(trained.states[0], strict=False)
    card = ExpertCard(architecture=config, schedule=flow.schedule, kind=flow.kind, latent=space, images=0)
    denoiser = bridged(network.eval().requires_grad_(False), card, LinearFlow())
    wanted = torch.arange(SAMPLES) % config.classes
    found: dict[str, Any] = {"latent": shape, "patch": config.patch, "training_seconds": round(seconds)}
    for guidance in GUIDANCES:
        with torch.inference_mode():
            latents = generate(
                denoiser, shape, list(range(SAMPLES)), Condition(labels=wanted), steps=STEPS, solver="dpmpp_2m",
                guidance=guidance, batch=100, device=torch.device("cpu"),
            )  # fmt: skip
            painted = autoencoder.decode(space.restore(latents))
        found[f"guidance {guidance:g}"] = judge(painted, wanted)
        print(name, guidance, found[f"guidance {guidance:g}"], file=sys.stderr, flush=True)
        if arguments.sheets is not None and guidance == 2.0:
            rows = (
                painted[: 12 * config.classes].unflatten(0, (12, config.classes)).permute(1, 3, 0, 4, 2).flatten(2, 3)
            )
            Image.fromarray(rows.flatten(0, 1).contiguous().numpy()).save(arguments.sheets / f"{name}.png")
    return found


if __name__ == "__main__":
    main()
