"""The model a user sees: prompts in, images out."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from .artifacts import Store, UserError, canonical_json, find, sha256_bytes
from .convert.release import is_release, read_release, to_pipeline
from .data.space import LatentSpace, TextSpace
from .data.text import text_encoder
from .ensemble.asking import AskedEvery
from .ensemble.load import Ensemble, load_ensemble
from .ensemble.missing import ExpertsMissing
from .ensemble.mixture import Mixture
from .ensemble.placing import Alone, Placement, load_alone
from .ensemble.record import Glimpse, RouteWatch, WatchedRoute
from .ensemble.routes import Fixed, parse_route
from .islands.expert import KIND as EXPERT
from .models.autoencoders import load_autoencoder
from .process import Condition, Denoiser
from .sampling import Sampling as Sampling  # for whoever imports the model
from .sampling import Step, image_seeds
from .sampling import stream as paint
from .sampling.out_of_step import paint_out_of_step
from .training.execution import named_or_best
from .training.resources import parse_memory, usable

DECODE_BATCH = 64  # images an autoencoder decodes at once: its activations dwarf the latents
Progress = Callable[[int, int], None]  # (image-steps done, image-steps in all)


@dataclass(frozen=True)
class Model:
    """An ensemble, or one expert alone, with the text encoder and autoencoder around it.

    model = atoll.load("runs/demo")
    images = model.generate(["a handwritten seven"], steps=50, guidance=2.0, route="top-2", seed=0)
    """

    body: Ensemble | Alone
    latent: LatentSpace
    text: TextSpace | None
    digest: str
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def generate(
        self,
        prompts: str | Sequence[str],
        sampling: Sampling | None = None,
        *,
        seed: int | Sequence[int] = 0,
        steps: int | None = None,
        guidance: float | None = None,
        route: str | None = None,
        solver: str | None = None,
        batch: int = 64,
        callback: Callable[[Moment], None] | None = None,
    ) -> list[Image.Image]:
        """One image per prompt. Image i uses seed + i, or the i-th of a given list of seeds.

        What is asked for most has a keyword; all else is a field of `sampling`, whose values the keywords replace.
        `callback` is called after every step of every batch; it may look, and changes nothing.
        """
        prompts = listed(prompts)
        seeds = image_seeds(seed, len(prompts))
        chosen = changed(sampling, steps=steps, guidance=guidance, route=route, solver=solver)
        return to_pil(self.decode(self.latents(prompts, seeds, chosen, batch=batch, callback=callback)))

    def stream(
        self,
        prompts: str | Sequence[str],
        sampling: Sampling | None = None,
        *,
        seed: int | Sequence[int] = 0,
        steps: int | None = None,
        guidance: float | None = None,
        route: str | None = None,
        solver: str | None = None,
        batch: int = 64,
    ) -> Iterator[Moment]:
        """The images of `generate` with the same arguments, step by step, and no step before it is asked for.

        Every step of the first `batch` images comes before those of the next; the last step of an image finishes it.
        """
        prompts = listed(prompts)
        chosen = changed(sampling, steps=steps, guidance=guidance, route=route, solver=solver)
        seen = Glimpse()
        walk = self._walk(prompts, image_seeds(seed, len(prompts)), chosen, batch, seen.add)
        return (self._moment(rows, step, chosen.steps, seen) for rows, step in walk)

    def latents(
        self,
        prompts: Sequence[str],
        seeds: Sequence[int],
        sampling: Sampling = Sampling(),
        *,
        batch: int = 64,
        progress: Progress | None = None,
        callback: Callable[[Moment], None] | None = None,
        watch: RouteWatch | None = None,
    ) -> Tensor:
        """Normalised latents [N, C, H, W] for N prompts and their seeds; image i depends on seed i only.

        `callback` sees every step, `watch` every routing. Where experts take turns, images go in step for a callback
        only.
        """
        seen = Glimpse()
        watchers: list[RouteWatch] = [] if callback is None else [seen.add]
        watchers += [] if watch is None else [watch]
        if callback is None and (unhurried := self._taking_turns(sampling, *watchers)) is not None:
            return paint_out_of_step(
                unhurried,
                self.latent.shape,
                seeds,
                self.condition(prompts),
                self.settled(sampling),
                batch=batch,
                device=self.device,
                progress=progress,
            )
        latents = torch.empty(len(seeds), *self.latent.shape, device=self.device)
        for rows, step in self._walk(prompts, seeds, sampling, batch, *watchers):
            latents[rows] = step.after
            if callback is not None:
                callback(self._moment(rows, step, sampling.steps, seen))
            if progress is not None:
                done = rows.start * sampling.steps + (step.index + 1) * (rows.stop - rows.start)
                progress(done, len(seeds) * sampling.steps)
        return latents

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """Normalised latents to images uint8 [N, C, H, W] on the CPU."""
        autoencoder = load_autoencoder(self.latent.autoencoder)
        parts = torch.split(latents, DECODE_BATCH)
        return torch.cat([autoencoder.decode(self.latent.restore(part.to(self.device))).cpu() for part in parts])

    @property
    def default_route(self) -> str | None:
        return self.body.version.route if isinstance(self.body, Ensemble) else None

    @property
    def missing(self) -> Mapping[int, str]:
        """Clusters that have no expert here, and why: their weight goes to the others."""
        return self.body.missing if isinstance(self.body, Ensemble) else {}

    @property
    def classes(self) -> int | None:
        """How many class labels the networks read, for a model conditioned on labels instead of text."""
        expert = self.body if isinstance(self.body, Alone) else self.body.experts[0]
        return expert.card.architecture.classes

    @property
    def is_conditional(self) -> bool:
        """Whether a prompt means anything to it."""
        return self.text is not None or self.classes is not None

    def condition(self, prompts: Sequence[str]) -> Condition | None:
        """Prompts as the condition the networks read: text, or a class number; None for a model without either."""
        if self.text is not None:
            return Condition(**text_encoder(self.text, str(self.device)).encode(prompts))
        if self.classes is not None:
            return Condition(labels=torch.tensor([class_number(prompt, self.classes) for prompt in prompts]))
        if any(prompts):
            raise UserError(f"--prompt {prompts[0]!r}: this model was trained without text; leave the prompt out")
        return None

    def settled(self, sampling: Sampling) -> Sampling:
        """The same with nothing left open: which route, in what precision; no guidance where no prompt can guide."""
        if isinstance(self.body, Alone) and sampling.route is not None:
            raise UserError(
                f"--route {sampling.route}: this is a single expert, there is nothing to route; leave it out"
            )
        return replace(
            sampling,
            guidance=sampling.guidance if self.is_conditional else 1.0,
            route=sampling.route or self.default_route,
            route_every=sampling.route_every if isinstance(self.body, Ensemble) else 1,
            precision="bfloat16" if sampling.precision_on(self.device) is torch.bfloat16 else "float32",
        )

    def denoiser(self, sampling: Sampling = Sampling(), *watchers: RouteWatch) -> Denoiser:
        """The model as one denoiser on the reference path; the watchers see what is routed."""
        sampling = self.settled(sampling)
        assert sampling.precision != "auto", "settled"
        if isinstance(self.body, Alone):
            return self.body.denoiser(sampling.precision)
        assert sampling.route is not None, "settled"
        route = parse_route(sampling.route)
        # one that is fixed at the first step has no use for later answers
        every = sampling.steps if isinstance(route, Fixed) else sampling.route_every
        for watch in watchers:
            route = WatchedRoute(route, watch)
        mixture = self.body.mixture(route, sampling.guidance_weights, sampling.precision)
        if every == 1:
            return mixture
        return replace(mixture, router=AskedEvery(mixture.router, sampling.times(mixture.schedule), every))

    def _taking_turns(self, sampling: Sampling, *watchers: RouteWatch) -> Mixture | None:
        """The model's mixture if not all of its experts are there at a time: its images then need not go in step."""
        denoiser = self.denoiser(sampling, *watchers)
        return denoiser if isinstance(denoiser, Mixture) and denoiser.takes_turns else None

    @property
    def said(self) -> str:
        """Where the experts are and why, in one line."""
        return self.body.placed.said

    def to_diffusers(self) -> Any:
        """The model as a diffusers pipeline, with its own copy of the weights in float32.

        Its `save_pretrained` writes a folder for people who have diffusers and no atoll, as `atoll export` does.
        """
        return to_pipeline(self.body, self.latent, self.text, self.device)

    def _walk(
        self, prompts: Sequence[str], seeds: Sequence[int], sampling: Sampling, batch: int, *watchers: RouteWatch
    ) -> Iterator[tuple[slice, Step]]:
        sampling = self.settled(sampling)
        denoiser, condition = self.denoiser(sampling, *watchers), self.condition(prompts)
        return paint(denoiser, self.latent.shape, seeds, condition, sampling, batch=batch, device=self.device)

    def _moment(self, rows: slice, step: Step, steps: int, seen: Glimpse) -> Moment:
        # copies: what a router or a route keeps must not be changed by who looks at it
        routed = [part.to("cpu", torch.float32, copy=True) for part in seen.taken() or ()]
        weights, shares = routed or (None, None)
        last = step.index + 1 == steps
        return Moment(
            images=range(rows.start, rows.stop),
            step=step.index + 1,
            steps=steps,
            time=step.time,
            x0=step.x0,
            weights=weights,
            shares=shares,
            _model=self,
            _latents=step.after if last else None,
        )


@dataclass(frozen=True, eq=False)
class Moment:
    """Some images of a call after one step, as a watcher sees them. Whatever is done with it, the images stay.

    images    their places in the call's list of prompts
    step      1 .. steps
    time      the t at which the model was asked: 1 is noise, 0 is data
    x0        the clean latents as estimated there [B, C, H, W], on the model's device
    weights   the router's p(k | x, t, prompt) [B, K], on the CPU; None for a single expert
    shares    what each expert counted for after the route [B, K], on the CPU; None for a single expert
    """

    images: range
    step: int
    steps: int
    time: float
    x0: Tensor = field(repr=False)
    weights: Tensor | None = field(repr=False)
    shares: Tensor | None = field(repr=False)
    _model: Model = field(repr=False)
    _latents: Tensor | None = field(repr=False)

    @property
    def previews(self) -> list[Image.Image]:
        """The estimate as small pictures, one pixel per place of the latents, by the map fitted at `prepare`."""
        return to_pil(self._model.latent.previews(self.x0).cpu())

    @property
    def decoded(self) -> list[Image.Image]:
        """The estimate as the autoencoder decodes it: full size, at its price."""
        return to_pil(self._model.decode(self.x0))

    @property
    def finished(self) -> list[Image.Image] | None:
        """The images themselves, at their last step."""
        return None if self._latents is None else to_pil(self._model.decode(self._latents))


def listed(prompts: str | Sequence[str]) -> list[str]:
    """One prompt per image; a single one may come as it is."""
    prompts = [prompts] if isinstance(prompts, str) else list(prompts)
    for prompt in prompts:
        if not isinstance(prompt, str):
            raise UserError(f"--prompt {prompt!r}: a prompt is a text; write it in quotes")
    return prompts


def changed(
    sampling: Sampling | None, *, steps: int | None, guidance: float | None, route: str | None, solver: str | None
) -> Sampling:
    """`sampling`, or the default one, with the values that are given."""
    given = {"steps": steps, "guidance": guidance, "route": route, "solver": solver}
    changes = {name: value for name, value in given.items() if value is not None}
    return replace(sampling or Sampling(), **changes)  # type: ignore[arg-type]


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


def load(
    place: str | Path,
    *,
    router: str | None = None,
    device: str | None = None,
    memory: str | float | None = None,
    weights: str | None = None,
    organisers: str | Path | None = None,
) -> Model:
    """Load a run (a folder or URL) in its newest version, one expert's folder, or a folder of `atoll export`.

    `router` names another router folder of the run than the one that version names. Experts that are missing are
    left out with a warning. `device` may name several, "cuda:0,cuda:1": experts are spread over them. `memory` ("12GB",
    or a number of GiB) is what the experts may take of each; where not all have room they take turns. `weights` "int8"
    keeps them in half the memory of bfloat16, and makes slightly other images. `organisers` is an allowed_signers file:
    one of them must have signed the model's version. Without it a run's own file of that name is asked, if it has one.
    """
    store = Store.at(place)
    placement = placement_of(device, memory, weights)
    if not store.exists():
        raise UserError(f"{place}: no such run; check the path, or make one with `atoll demo`")
    artifact = find(store)
    if artifact is not None and artifact.manifest.kind == EXPERT:
        alone = load_alone(store, placement)
        return Model(alone, alone.card.latent, alone.card.text, rounded(alone.digest, placement), placement.device)
    if is_release(store):
        if router is not None:
            raise UserError(f"--router {router}: {place} is a released folder with one router; leave it out")
        made = read_release(store, placement)
        return Model(made.body, made.latent, made.text, rounded(made.digest, placement), placement.device)
    ensemble = load_ensemble(store, router, placement, None if organisers is None else Path(organisers).read_bytes())
    if (complaint := ensemble.complaint()) is not None:
        warnings.warn(ExpertsMissing(f"{place}: {complaint}"), stacklevel=2)
    # the version names its own router; another one makes another model
    digest = ensemble.model_digest()
    if router is not None:
        digest = sha256_bytes(canonical_json([digest, ensemble.router.digest]))
    version = ensemble.version
    return Model(ensemble, version.latent, version.text, rounded(digest, placement), placement.device)


def placement_of(device: str | None, memory: str | float | None, weights: str | None) -> Placement:
    """Where experts go, as the user says it."""
    if weights not in (None, "int8"):
        raise UserError(f"--weights {weights}: use int8, or leave it out for weights of the precision")
    names = named_or_best(device).split(",")
    for name in names:
        if not usable(name):
            raise UserError(f"--device {name}: this machine has none; use cpu")
    devices = tuple(torch.empty(0, device=name).device for name in names)  # with its number, where it has one
    if len({on.type for on in devices}) > 1:
        raise UserError(f"--device {device}: experts are spread over devices of one kind; leave one out")
    room = parse_memory(memory) if isinstance(memory, str) else memory
    return Placement(devices, room, int8=weights == "int8")


def rounded(digest: str, placement: Placement) -> str:
    """The digest of a model whose weights were rounded: it paints other images."""
    return sha256_bytes(canonical_json([digest, "int8"])) if placement.int8 else digest
