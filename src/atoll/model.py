"""The model a user sees: prompts in, images out."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Integral
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from .artifacts import Store, UserError, canonical_json, find, sanitize, sha256_bytes
from .convert.release import digest_of, is_release, read_release, spaces_of, to_pipeline
from .data.classes import class_number, class_title
from .data.space import LatentConfig, TextConfig
from .data.text import text_encoder
from .diffusion import Condition, Denoiser, NegativeCondition
from .islands.expert import KIND as EXPERT
from .mixture.missing import ExpertsMissing
from .mixture.routes import parse_route
from .models.autoencoders import load_autoencoder
from .runtime.load import Ensemble, load_ensemble
from .runtime.placing import Placement, SingleExpert, load_single_expert, placement_of
from .sampling import Request, Routed, Step, image_seeds
from .sampling import Sampling as Sampling  # for those who import the model
from .sampling import stream as sample

DECODED_PIXELS = 2**20  # decoded at once: an autoencoder's activations dwarf the latents
NAMES_SHOWN = 5  # classes in the short description of a model
Prompts = str | int | Sequence[str | int]  # one, or one per image


@dataclass(frozen=True, repr=False)
class Model:
    """An ensemble, or one expert alone, with the text encoder and autoencoder around it.

    model = atoll.load("runs/demo")
    images = model.generate(["a handwritten seven"], steps=50, guidance=2.0, route="top-2", seed=0)

    Latents are [N, C, H, W] of `latent.shape`, normalized; images are PIL pictures, or uint8 [N, 1 or 3, H, W].
    A prompt is a text, or for a model of labels the name or the number of a class (`class_names`).
    """

    body: Ensemble | SingleExpert
    latent: LatentConfig
    text: TextConfig | None
    digest: str
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    class_names: tuple[str, ...] | None = None

    def __repr__(self) -> str:
        experts = "one expert" if isinstance(self.body, SingleExpert) else f"{len(self.body.experts)} experts"
        latents = "x".join(map(str, self.latent.shape))
        return f"<atoll.Model {self.digest[:12]}: {experts}, latents {latents}, {self.reads}, on {self.device}>"

    def generate(
        self,
        prompts: Prompts = "",
        sampling: Sampling | None = None,
        *,
        negative_prompt: Prompts | None = None,
        seed: int | Sequence[int] = 0,
        steps: int | None = None,
        guidance: float | None = None,
        route: str | None = None,
        solver: str | None = None,
        batch: int = 64,
        callback: Callable[[StepInfo], None] | None = None,
    ) -> list[Image.Image]:
        """One image per prompt: `generate("a cat")` is one, `generate(["a cat"] * 4)` are four.

        prompts            a text or a list of N; for a model of labels, names or numbers of classes
        negative_prompt    what to guide away from, instead of from no prompt: one for all, or a list of N
        seed               image i uses seed + i, or the i-th of a list of N
        steps, guidance, route, solver   the most used fields of `sampling` (docs/sampling.md), which they replace
        batch              images the networks see at a time
        callback           called after every step of some images; it cannot change them

        Returns N pictures, in the order of the prompts.
        """
        chosen = changed(sampling, steps=steps, guidance=guidance, route=route, solver=solver)
        given = listed(prompts)
        on_step = None if callback is None else lambda step: callback(StepInfo(self, chosen.steps, step))
        seeds = image_seeds(seed, len(given))
        latents = self.latents(given, seeds, chosen, negative=negative_prompt, batch=batch, on_step=on_step)
        return to_pil(self.decode(latents))

    def stream(
        self,
        prompts: Prompts = "",
        sampling: Sampling | None = None,
        *,
        negative_prompt: Prompts | None = None,
        seed: int | Sequence[int] = 0,
        steps: int | None = None,
        guidance: float | None = None,
        route: str | None = None,
        solver: str | None = None,
        batch: int = 64,
    ) -> Iterator[StepInfo]:
        """The images of `generate` with the same arguments, step by step; a step is computed when it is asked for.

        Every step of the first `batch` images comes before those of the next; the last step of an image finishes it.
        Where experts take turns in memory, images advance independently.
        """
        chosen = changed(sampling, steps=steps, guidance=guidance, route=route, solver=solver)
        given = listed(prompts)
        walk = self._steps(given, image_seeds(seed, len(given)), chosen, negative_prompt, batch)
        return (StepInfo(self, chosen.steps, step) for step in walk)

    def latents(
        self,
        prompts: Sequence[str | int],
        seeds: Sequence[int],
        sampling: Sampling = Sampling(),
        *,
        negative: Prompts | None = None,
        batch: int = 64,
        on_step: Callable[[Step], None] | None = None,
    ) -> Tensor:
        """Normalized latents [N, C, H, W] for N prompts and their seeds; image i depends on seed i only."""
        latents = torch.empty(len(seeds), *self.latent.shape, device=self.device)
        for step in self._steps(prompts, seeds, sampling, negative, batch):
            if step.latents is not None:
                latents[step.images] = step.latents
            if on_step is not None:
                on_step(step)
        return latents

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """Normalized latents to images uint8 [N, C, H, W] on the CPU."""
        autoencoder = load_autoencoder(self.latent.autoencoder)
        images, size = [], 1  # the first image alone: it tells how many pixels one has
        while len(latents):
            part, latents = latents[:size], latents[size:]
            images.append(autoencoder.decode(self.latent.denormalize(part.to(self.device))).cpu())
            size = max(1, DECODED_PIXELS // (images[0].shape[-1] * images[0].shape[-2]))
        return torch.cat(images)

    @property
    def missing(self) -> Mapping[int, str]:
        """Clusters that have no expert here, and why: the others are weighted up."""
        return self.body.missing if isinstance(self.body, Ensemble) else {}

    @property
    def classes(self) -> int | None:
        """How many class labels the networks read, for a model conditioned on labels instead of text."""
        expert = self.body if isinstance(self.body, SingleExpert) else self.body.experts[0]
        return expert.card.architecture.classes

    @property
    def is_conditional(self) -> bool:
        """Whether a prompt means anything to it."""
        return self.text is not None or self.classes is not None

    @property
    def reads(self) -> str:
        """What its prompts are, in a few words."""
        if self.text is not None:
            return "reads text"
        if self.classes is None:
            return "reads no prompts"
        if self.class_names is None:
            return f"reads class numbers 0 to {self.classes - 1}"
        shown = ", ".join(sanitize(name, 30) for name in self.class_names[:NAMES_SHOWN])
        return f"reads {self.classes} classes ({shown}{', ...' if self.classes > NAMES_SHOWN else ''})"

    def condition(self, prompts: Sequence[str | int], negative: Prompts | None = None) -> Condition | None:
        """N prompts as the condition [N] the networks read: text, or a class; None for a model without either.

        With `negative` prompts, one or N, guidance leads away from these.
        """
        condition: Condition | None = None
        if self.text is not None:
            condition = Condition(**text_encoder(self.text, str(self.device)).encode(texts(prompts)))
        elif self.classes is not None:
            classes = [class_number(prompt, self.classes, self.class_names) for prompt in prompts]
            condition = Condition(labels=torch.tensor(classes, dtype=torch.int64))
        elif any(prompt != "" for prompt in prompts):
            raise UserError(
                "--prompt: the data had no captions or labels, so this model reads no prompts; leave it out"
            )
        if negative is None:
            return condition
        away = listed(negative)
        away = away * len(prompts) if len(away) == 1 else away
        if condition is None:
            raise UserError("--negative-prompt: this model reads no prompts; leave it out")
        if len(away) != len(prompts):
            raise UserError(
                f"--negative-prompt: give one, or one for each of the {len(prompts)} prompts, not {len(away)}"
            )
        opposite = self.condition(away)
        assert opposite is not None, "a model that reads a prompt reads a negative one"
        return NegativeCondition(**condition.tensors(), negative=opposite)

    def titles(self, prompts: Sequence[str | int]) -> list[str]:
        """Prompts as sheets and records show them: texts as they are, classes by name. Each means the same again."""
        if self.text is not None or self.classes is None:
            return texts(prompts)
        return [class_title(class_number(p, self.classes, self.class_names), self.class_names) for p in prompts]

    def resolved(self, sampling: Sampling) -> Sampling:
        """The same with the model's own route and precision filled in; no guidance where no prompt can guide."""
        alone = isinstance(self.body, SingleExpert)
        if alone and sampling.route is not None:
            raise UserError(
                f"--route {sampling.route}: this is a single expert, there is nothing to route; leave it out"
            )
        return replace(
            sampling,
            guidance=sampling.guidance if self.is_conditional else 1.0,
            route=None if isinstance(self.body, SingleExpert) else sampling.route or self.body.version.route,
            route_every=1 if alone else sampling.route_every,
            precision=sampling.precision_on(self.device),
        )

    def denoiser(self, sampling: Sampling = Sampling()) -> Denoiser | Routed:
        """The model as one denoiser on the sampling path."""
        precision = sampling.precision_on(self.device)
        if isinstance(self.body, SingleExpert):
            return self.body.denoiser(precision)
        return self.body.mixture(parse_route(sampling.route or self.body.version.route), precision)

    def takes_turns(self, sampling: Sampling = Sampling()) -> bool:
        """Whether not all of its experts fit in memory, so that many images at once are faster."""
        denoiser = self.denoiser(sampling)
        return isinstance(denoiser, Routed) and denoiser.next_expert is not None

    @property
    def placement(self) -> str:
        """Where the experts are and why, in one line."""
        return self.body.placed.summary

    def to_diffusers(self) -> Any:
        """The model as a diffusers pipeline, with its own copy of the weights in float32.

        Its `save_pretrained` writes a folder for people who have diffusers and no atoll, as `atoll export` does.
        """
        return to_pipeline(self.body, self.device)

    def _steps(
        self,
        prompts: Sequence[str | int],
        seeds: Sequence[int],
        sampling: Sampling,
        negative: Prompts | None,
        batch: int,
    ) -> Iterator[Step]:
        sampling = self.resolved(sampling)
        condition = self.condition(prompts, negative)
        if negative is not None and sampling.guidance == 1.0:
            raise UserError("--negative-prompt: has no effect at guidance 1; use more, such as 2, or leave it out")
        request = Request(seeds, condition, sampling)
        return sample(self.denoiser(sampling), self.latent.shape, request, batch=batch, device=self.device)


@dataclass(frozen=True, eq=False, repr=False)
class StepInfo:
    """Some images of a call after one step."""

    _model: Model
    steps: int
    _step: Step

    @property
    def images(self) -> range:
        """Their places in the call's list of prompts."""
        return range(self._step.images.start, self._step.images.stop)

    @property
    def step(self) -> int:
        """1 .. steps."""
        return self._step.index + 1

    @property
    def time(self) -> float:
        """The t of the velocity: 1 is noise, 0 is data."""
        return self._step.time

    @property
    def weights(self) -> Tensor | None:
        """The router's p(k | x, t, prompt) [B, K], on the CPU; None for a single expert."""
        return None if isinstance(self._model.body, SingleExpert) else copied(self._step.weights)

    @property
    def expert_weights(self) -> Tensor | None:
        """The same after the route [B, K]."""
        return None if isinstance(self._model.body, SingleExpert) else copied(self._step.chosen)

    @property
    def x0(self) -> Tensor:
        """The clean latents as estimated at `time` [B, C, H, W], on the model's device."""
        return self._step.x0

    @property
    def previews(self) -> list[Image.Image]:
        """The estimate as small pictures, one pixel per place of the latents, by the map fitted at `prepare`."""
        return to_pil(self._model.latent.previews(self.x0).cpu())

    @property
    def decoded(self) -> list[Image.Image]:
        """The estimate as the autoencoder decodes it: full size, and slower."""
        return to_pil(self._model.decode(self.x0))

    @property
    def finished(self) -> list[Image.Image] | None:
        """The images themselves, at their last step."""
        return None if self._step.latents is None else to_pil(self._model.decode(self._step.latents))


def copied(weights: Tensor) -> Tensor:
    """On the CPU, so that a callback may do with it what it likes."""
    return weights.to("cpu", torch.float32, copy=True)


def listed(prompts: Prompts) -> list[str | int]:
    """One prompt per image; a single one may come as it is. Numbers may be numpy's."""
    given = [prompts] if isinstance(prompts, str | int | Integral) else list(prompts)
    for prompt in given:
        if not isinstance(prompt, str | Integral) or isinstance(prompt, bool):
            raise UserError(f"--prompt {prompt!r}: a prompt is a text in quotes, or the number of a class")
    return [prompt if isinstance(prompt, str) else int(prompt) for prompt in given]


def texts(prompts: Sequence[str | int]) -> list[str]:
    """Prompts of a model that reads no class numbers."""
    for prompt in prompts:
        if not isinstance(prompt, str):
            raise UserError(f"--prompt {prompt}: this model reads no class numbers; write a text in quotes")
    return [str(prompt) for prompt in prompts]


def changed(
    sampling: Sampling | None, *, steps: int | None, guidance: float | None, route: str | None, solver: str | None
) -> Sampling:
    """`sampling`, or the default one, with the values that are given."""
    given = {"steps": steps, "guidance": guidance, "route": route, "solver": solver}
    changes = {name: value for name, value in given.items() if value is not None}
    return replace(sampling or Sampling(), **changes)  # type: ignore[arg-type]


def to_pil(images: Tensor) -> list[Image.Image]:
    """uint8 [N, 1 or 3, H, W] as pictures."""
    return [
        Image.fromarray(image.squeeze(0).numpy() if len(image) == 1 else image.permute(1, 2, 0).numpy())
        for image in images
    ]


def load(
    place: str | Path,
    *,
    router: str | None = None,
    device: str | torch.device | None = None,
    memory: str | float | None = None,
    weights: str | None = None,
    organizers: str | Path | None = None,
) -> Model:
    """Load a run (a folder or URL) in its newest version, one expert's folder, or a folder of `atoll export`.

    `router` names another router folder of the run than the one that version names. Experts that are missing are
    left out with a warning. `device` may name several, "cuda:0,cuda:1": experts are spread over them. `memory` ("12GB",
    or a number of GiB) is what the experts may take of each; where not all have room they take turns. `weights` "int8"
    keeps them in half the memory of bfloat16, and makes slightly other images. `organizers` is an allowed_signers file:
    one of them must have signed the model's version. Without it a run's own file of that name is asked, if it has one.
    """
    store = Store.at(place)
    placement = placement_of(device, memory, weights)
    if not store.exists():
        raise UserError(f"{place}: no such run; check the path, or make one with `atoll demo`")
    artifact = find(store)
    if artifact is not None and artifact.manifest.kind == EXPERT:
        alone = load_single_expert(store, placement)
        card, digest = alone.card, rounded(alone.digest, placement)
        return Model(alone, card.latent, card.text, digest, placement.device, card.class_names)
    if is_release(store):
        if router is not None:
            raise UserError(f"--router {router}: {place} is a released folder with one router; leave it out")
        made = read_release(store, placement)
        spaces, digest = spaces_of(made), rounded(digest_of(made), placement)
        return Model(made, spaces.latent, spaces.text, digest, placement.device, spaces.class_names)
    signers = None if organizers is None else Path(organizers).read_bytes()
    ensemble = load_ensemble(store, router, placement, signers)
    if (complaint := ensemble.complaint()) is not None:
        warnings.warn(ExpertsMissing(f"{place}: {complaint}"), stacklevel=2)
    # the version names its own router; another one makes another model
    digest = ensemble.model_digest()
    if router is not None:
        digest = sha256_bytes(canonical_json([digest, ensemble.router.digest]))
    version = ensemble.version
    digest, names = rounded(digest, placement), version.class_names
    return Model(ensemble, version.latent, version.text, digest, placement.device, names)


def rounded(digest: str, placement: Placement) -> str:
    """The digest of a model whose weights were rounded: it paints other images."""
    return sha256_bytes(canonical_json([digest, "int8"])) if placement.int8 else digest
