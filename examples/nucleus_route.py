"""A route of one's own: the fewest experts whose weights reach p together.

    python examples/nucleus_route.py runs/demo "a handwritten seven"

A route is a callable from the router's weights [B, K], times [B] and the images' seeds to the weights of the experts to
run.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

import atoll
from atoll.sampling import Engine, Request, Sampling, image_seeds


@dataclass(frozen=True)
class Nucleus:
    p: float

    def __call__(self, weights: Tensor, t: Tensor, seeds: Sequence[int]) -> Tensor:
        ranked, order = weights.sort(dim=1, descending=True)
        before = ranked.cumsum(dim=1) - ranked  # what more likely experts hold together
        kept = weights * torch.zeros_like(weights, dtype=torch.bool).scatter(1, order, before < self.p)
        return kept / kept.sum(dim=1, keepdim=True)


def sample(run: str, prompt: str, count: int = 4, steps: int = 20) -> Tensor:
    """Latents [count, C, H, W]."""
    model = atoll.load(run)
    sampling = Sampling(steps=steps, guidance=2.0)
    engine = Engine(model.denoiser(sampling), model.latent.shape, device=model.device)
    request = Request(image_seeds(0, count), model.condition([prompt] * count), sampling, Nucleus(0.9))
    engine.admit(request)
    while len(engine):
        engine.round()
    assert request.latents is not None
    return request.latents


if __name__ == "__main__":
    print(sample(sys.argv[1], sys.argv[2]).shape)
