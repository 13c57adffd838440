"""The model a user sees: prompts in, images out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor

from .artifacts import Store, UserError, canonical_json, find, sha256_bytes
from .data.space import LatentSpace, TextSpace
from .data.text import text_encoder
from .ensemble.load import Ensemble, load_ensemble
from .ensemble.mixture import GuidanceWeights
from .ensemble.routes import Route, parse_route
from .islands.expert import KIND as EXPERT
from .islands.expert import Expert, load_expert
from .models.autoencoders import load_autoencoder
from .process import Condition, Denoiser, LinearFlow
from .sampling import generate, image_seeds
from .training.execution import named_or_best

DEFAULT_SOLVER = "dpmpp_2m"
DECODE_BATCH = 64  # images an autoencoder decodes at once: its activations dwarf the latents
Progress = Callable[[int, int], None]  # (image-steps done, image-steps in all)


@dataclass(frozen=True)
class Model:
    """An ensemble, or one expert alone, with the text encoder and autoencoder around it.

    model = atoll.load("runs/demo")
    images = model.generate(["a handwritten seven"], steps=50, guidance=2.0, route="top-2", seed=0)
    """

    body: Ensemble | Expert
    latent: LatentSpace
    text: TextSpace | None
    digest: str
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @property
    def default_route(self) -> str | None:
        return self.body.version.route if isinstance(self.body, Ensemble) else None

    def denoiser(self, route: Route | None, guidance_weights: GuidanceWeights = "own") -> Denoiser:
        """The model as one denoiser on the reference path."""
        if isinstance(self.body, Expert):
            if route is not None:
                raise UserError("--route: this is a single expert, there is nothing to route; leave it out")
            return self.body.denoiser(LinearFlow())
        assert route is not None
        return self.body.mixture(route, guidance_weights)

    @property
    def classes(self) -> int | None:
        """How many class labels the networks read, for a model conditioned on labels instead of text."""
        expert = self.body if isinstance(self.body, Expert) else self.body.experts[0]
        return expert.card.architecture.classes

    def condition(self, prompts: Sequence[str]) -> Condition | None:
        """Prompts as the condition the networks read: text, or a class number; None for a model without either."""
        if self.text is not None:
            return Condition(**text_encoder(self.text, str(self.device)).encode(prompts))
        if self.classes is not None:
            return Condition(labels=torch.tensor([class_number(prompt, self.classes) for prompt in prompts]))
        if any(prompts):
            raise UserError(f"--prompt {prompts[0]!r}: this model was trained without text; leave the prompt out")
        return None

    def latents(
        self,
        prompts: Sequence[str],
        seeds: Sequence[int],
        *,
        steps: int = 50,
        guidance: float = 2.0,
        route: Route | None = None,
        solver: str = DEFAULT_SOLVER,
        grid: str = "uniform",
        guidance_weights: GuidanceWeights = "own",
        batch: int = 64,
        progress: Progress | None = None,
    ) -> Tensor:
        """Normalised latents [N, C, H, W] for N prompts and their seeds; image i depends on seed i only."""
        return generate(
            self.denoiser(route, guidance_weights),
            self.latent.shape,
            seeds,
            self.condition(prompts),
            steps=steps,
            solver=solver,
            grid=grid,
            guidance=guidance,
            batch=batch,
            device=self.device,
            progress=progress,
        )

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """Normalised latents to images uint8 [N, C, H, W] on the CPU."""
        autoencoder = load_autoencoder(self.latent.autoencoder)
        parts = [autoencoder.decode(self.latent.restore(part)).cpu() for part in torch.split(latents, DECODE_BATCH)]
        return torch.cat(parts)

    def generate(
        self,
        prompts: Sequence[str],
        *,
        steps: int = 50,
        guidance: float = 2.0,
        route: str | None = None,
        seed: int | Sequence[int] = 0,
        solver: str = DEFAULT_SOLVER,
        batch: int = 64,
    ) -> list[Image.Image]:
        """One image per prompt. Image i uses seed + i, or the i-th of a given list of seeds."""
        latents = self.latents(
            prompts,
            image_seeds(seed, len(prompts)),
            steps=steps,
            guidance=guidance,
            route=self.parse_route(route),
            solver=solver,
            batch=batch,
        )
        return to_pil(self.decode(latents))

    def parse_route(self, route: str | None) -> Route | None:
        """A route by name; the ensemble's default one for None."""
        name = route or self.default_route
        return None if name is None else parse_route(name)


def class_number(prompt: str, classes: int) -> int:
    """A prompt that is a class label."""
    if not prompt.isdecimal() or int(prompt) >= classes:
        raise UserError(f"--prompt {prompt!r}: this model reads a class number from 0 to {classes - 1}, not text")
    return int(prompt)


def to_pil(images: Tensor) -> list[Image.Image]:
    """uint8 [N, 1 or 3, H, W] as pictures."""
    return [
        Image.fromarray(image.squeeze(0).numpy() if len(image) == 1 else image.permute(1, 2, 0).numpy())
        for image in images
    ]


def load(place: str | Path, *, router: str | None = None, device: str | None = None) -> Model:
    """Load a run (a folder or URL) in its newest version, or one expert's folder.

    `router` names another router folder of the run than the one that version names.
    """
    store = Store.at(place)
    on = torch.device(named_or_best(device))
    if not store.exists():
        raise UserError(f"{place}: no such run; check the path, or make one with `atoll demo`")
    artifact = find(store)
    if artifact is not None and artifact.manifest.kind == EXPERT:
        expert = load_expert(store, on)
        return Model(expert, expert.card.latent, expert.card.text, expert.digest, on)
    ensemble = load_ensemble(store, router, on)
    # the version names its own router; another one makes another model
    digest = ensemble.version.model_digest()
    if router is not None:
        digest = sha256_bytes(canonical_json([digest, ensemble.router.digest]))
    return Model(ensemble, ensemble.version.latent, ensemble.version.text, digest, on)
