"""partition.html, one self-contained page that shows the clusters, and the sample grid of each in sheets/NN.png."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2
import torch
from torch import Tensor

from ..data.contact_sheet import contact_sheet
from ..models.autoencoders import Autoencoder
from .config import PartitionConfig
from .quality import summary_lines

# of clusters in turn: told apart by people who see red and green alike
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#b8860b", "#4a3f8f", "#56a0c9", "#7a7a7a")


def write_sheet(path: Path, latents: Tensor, autoencoder: Autoencoder) -> None:
    """A grid of images from latents [N, C, H, W] as the autoencoder gave them."""
    with torch.inference_mode():
        images = torch.cat([autoencoder.decode(part) for part in latents.split(8)])  # as many as a core's cache holds
    path.parent.mkdir(parents=True, exist_ok=True)
    contact_sheet(images.numpy()).save(path)


def write_report(
    path: Path,
    config: PartitionConfig,
    data: Mapping[str, Any],
    sizes: Sequence[Mapping[str, int]],
    quality: Mapping[str, Any],
    summary: Sequence[Mapping[str, Any]],
    sheets: Path,
) -> None:
    total = sum(size["train"] for size in sizes)
    how = f"Clustered by {config.method} on {data['features']['extractor']} features, seed {config.seed}"
    if config.method in ("label", "random"):
        how = f"Clustered by {config.method}, seed {config.seed}"
    if config.method == "label" and quality["unlabelled"]:
        how += f"; without a label {quality['unlabelled']:,}, by a hash of their id"
    numbers = [("largest over smallest cluster", quality["balance"], "1 is perfectly even")]
    if quality["nmi"] is not None:
        meaning = "normalized mutual information with the labels; 1 is the same clusters"
        numbers.append(("agreement with labels", quality["nmi"]["clusters"], meaning))
        numbers.append(("the same of random clusters", quality["nmi"]["random"], ""))
    clusters = [
        {
            "number": k,
            **size,
            "fraction": size["train"] / total,
            "color": COLORS[k % len(COLORS)],
            "lines": summary_lines(summary[k]),
            "sheet": base64.b64encode((sheets / f"{k:02d}.png").read_bytes()).decode(),
        }
        for k, size in enumerate(sizes)
    ]
    source = resources.files(__package__).joinpath("report.html").read_text()
    template = jinja2.Environment(autoescape=True).from_string(source)
    title = f"{len(sizes)} clusters of {data['count']:,} images"
    path.write_text(template.render(title=title, how=how, numbers=numbers, clusters=clusters))
