"""Sample sheets: what a network in training would paint by now, for whoever looks at its folder.

At every tenth of the budget the same few images, from the same noise and conditions, are painted by the averaged
weights and shown through the latents' linear map, without the autoencoder. Nothing that is learned depends on it, and
no digest knows of it.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch

from ..artifacts import write_atomic
from ..data.contact_sheet import contact_sheet
from ..data.dataset import LatentDataset
from ..diffusion import Condition, LinearFlow
from ..sampling import Sampling, generate
from ..training.execution import Execution, autocast
from .expert import bridged
from .learning import ExpertLearner

FOLDER = "sheets"
IMAGES, STEPS, SOLVER, GUIDANCE = 16, 12, "dpmpp_2m", 2.0
TENTHS = 10
LIMIT = 5.0  # sigma/alpha at which a noise expert is asked at most: its own limit is measured when it is trained


@dataclass(frozen=True)
class Sheets:
    """`DIR/sheets/010.png` to `100.png`: the number is the share of the budget, in percent."""

    folder: Path
    learner: ExpertLearner
    samples: LatentDataset

    def clear(self) -> None:
        """Take away the sheets of a training that was begun here before and thrown away."""
        for tenth in range(1, TENTHS + 1):
            self._path(tenth).unlink(missing_ok=True)

    def show(self, images: int, execution: Execution) -> None:
        """Paint the sheet that is due after this many images, unless it is there."""
        tenth = images * TENTHS // self.learner.order.training.images
        path = self._path(tenth)
        if tenth == 0 or path.exists():
            return
        with io.BytesIO() as stream:
            contact_sheet(self.paint(execution)).save(stream, format="PNG")
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(path, stream.getvalue())

    def paint(self, execution: Execution) -> np.ndarray:
        """Images uint8 [N, 1 or 3, H, W]."""
        learner, latent = self.learner, self.learner.order.latent
        guidance = GUIDANCE if learner.card.architecture.condition != "none" else 1.0
        card = learner.card.model_copy(update={"bridge_limit": min(LIMIT, learner.card.bridge_limit or LIMIT)})
        device = next(learner.network.parameters()).device
        with autocast(execution):
            latents = generate(
                bridged(learner.network, card, LinearFlow()),
                latent.shape,
                range(len(self._condition)),
                self._condition,
                Sampling(steps=STEPS, solver=SOLVER, guidance=guidance),
                batch=max(1, (execution.micro_batch or 2 * IMAGES) // 2),  # guidance asks about every image twice
                device=device,
            )
        return latent.previews(latents).cpu().numpy()

    def _path(self, tenth: int) -> Path:
        return self.folder / f"{100 * tenth // TENTHS:03d}.png"

    @cached_property
    def _condition(self) -> Condition:
        """Of samples spread over the cluster."""
        count = min(IMAGES, len(self.samples))
        rows = torch.linspace(0, len(self.samples) - 1, count).long()
        return self.samples.condition(rows, torch.zeros(count))
