"""An Atoll model as a diffusers pipeline.

Nothing of atoll imports this module: `bundle` embeds it and all modules it imports in one file, and that file is what a
diffusers folder holds and what `to_diffusers` runs. A pipeline has one component per expert and diffusers reads the
components' names off the signature of `__init__`, so the class itself, with as many experts as the model has, is the
last thing in that file (bundle.py, FILE).

Arguments have diffusers' names. Its conventions end here: a scheduler's sigma on the linear path is our t, and the
model's output that a scheduler takes is the velocity of the mixture.
"""

# diffusers' classes and decorators have no types we could rely on
# mypy: disable-error-code="misc,untyped-decorator"

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any, get_args

import torch
from diffusers import ConfigMixin, ImagePipelineOutput, ModelMixin, SchedulerMixin
from diffusers import __version__ as diffusers_version
from diffusers.configuration_utils import register_to_config
from diffusers.image_processor import VaeImageProcessor
from diffusers.models.autoencoders.vae import DecoderOutput
from diffusers.schedulers.scheduling_utils import SchedulerOutput
from diffusers.utils import SAFETENSORS_WEIGHTS_NAME
from diffusers.utils.torch_utils import randn_tensor
from safetensors.torch import save_file
from torch import Tensor

from ..artifacts import sha256_file
from ..data.classes import class_number
from ..data.text import word_ids
from ..diffusion import (
    AnySchedule,
    Bridge,
    Condition,
    Denoiser,
    Kind,
    LinearFlow,
    NegativeCondition,
    NetworkDenoiser,
    Schedule,
)
from ..mixture.mixture import Denoisers, Mixture
from ..mixture.routes import parse_route
from ..models.block_transform import BlockTransform
from ..models.dit import DiT, DiTConfig
from ..models.router import RouterConfig, build_router, cluster_weights
from ..models.text_encoders import encode_text
from ..models.tiny_autoencoder import TinyAutoencoder
from ..sampling.engine import Engine
from ..sampling.grids import parse_grid
from ..sampling.noise import step_noise
from ..sampling.requests import Request
from ..sampling.settings import Sampling
from ..sampling.solvers import SOLVERS, GridPath, StepNoise, Walk

STEPS_OF_A_SCHEDULER = 1000  # diffusers counts time in such steps; nothing here depends on the number
Prompts = str | int | Sequence[str | int]
SOLVERS_OF_ONE_CALL = ("dpmpp_2m", "euler", "stochastic", "unipc")  # diffusers runs the model once per step


def schedule_of(settings: Mapping[str, Any]) -> Schedule:
    """A schedule from its JSON form."""
    known = {field.default: kind for kind in get_args(AnySchedule) for field in fields(kind) if field.name == "name"}
    schedule: Schedule = known[settings["name"]](**settings)
    return schedule


def architecture_of(settings: Mapping[str, Any]) -> DiTConfig:
    """An architecture from its JSON form."""
    return DiTConfig(**{**settings, "latent": tuple(settings["latent"])})


class _Network(ModelMixin, ConfigMixin):
    """A network of ours and its card, with names of weights as in the run.

    `digest` is the artifact's in that run, `weights` the sha256 of the file of weights: an expert's here is the run's,
    byte for byte.
    """

    @register_to_config
    def __init__(self, card: dict[str, Any], digest: str | None = None, weights: str | None = None) -> None:
        super().__init__()
        network = self.build(card["architecture"])
        self.__dict__ |= {name: network.__dict__[name] for name in ("_modules", "_parameters", "_buffers")}
        self.__dict__["network"] = network  # no submodule: the two share their parts

    def save_pretrained(self, save_directory: str | Path) -> None:
        """Write config and weights. A network whose weights were changed loses its digest."""
        folder = Path(save_directory)
        folder.mkdir(parents=True, exist_ok=True)
        weights = {name: value.to("cpu", torch.float32).contiguous() for name, value in self.state_dict().items()}
        save_file(weights, folder / SAFETENSORS_WEIGHTS_NAME)
        digest = sha256_file(folder / SAFETENSORS_WEIGHTS_NAME)
        if self.config.weights not in (None, digest):
            self.register_to_config(digest=None)
        self.register_to_config(weights=digest)
        self.save_config(folder)

    def forward(self, x: Tensor, time: Tensor, condition: Condition | None = None) -> Tensor:
        prediction: Tensor = self.network(x, time, condition)
        return prediction


class AtollExpert(_Network):
    """One expert; its card has the schedule and prediction type it was trained for."""

    build = staticmethod(lambda settings: DiT(architecture_of(settings)))


class AtollRouter(_Network):
    """Which experts a noisy latent belongs to: logits [B, K]."""

    build = staticmethod(
        lambda settings: build_router(RouterConfig(**{**settings, "trunk": architecture_of(settings["trunk"])}))
    )


class AtollTinyAutoencoder(TinyAutoencoder, ModelMixin, ConfigMixin):
    """TAEF2, which diffusers' own AutoencoderTiny misreads; weights have the names of its file."""

    @register_to_config
    def __init__(self, latent_channels: int, pooled: bool) -> None:
        TinyAutoencoder.__init__(self, latent_channels, pooled=pooled)

    def decode(self, latents: Tensor) -> DecoderOutput:
        return DecoderOutput(sample=TinyAutoencoder.decode(self, latents))


class AtollBlockTransform(BlockTransform, ModelMixin, ConfigMixin):
    """Low frequencies of blocks: fixed numbers, kept in the folder like weights."""

    @register_to_config
    def __init__(self, side: int) -> None:
        BlockTransform.__init__(self, side)

    def decode(self, latents: Tensor) -> DecoderOutput:
        return DecoderOutput(sample=BlockTransform.decode(self, latents))


class AtollScheduler(SchedulerMixin, ConfigMixin):
    """Atoll's own solvers and time grids, one step at a time; the default is what `atoll sample` uses."""

    config_name = "scheduler_config.json"
    order = 1

    @register_to_config
    def __init__(
        self, solver: str = "dpmpp_2m", grid: str = "uniform", num_train_timesteps: int = STEPS_OF_A_SCHEDULER
    ) -> None:
        if solver not in SOLVERS_OF_ONE_CALL:
            choices = ", ".join(SOLVERS_OF_ONE_CALL)
            raise ValueError(f"solver {solver!r}: use one of {choices}, or a scheduler of diffusers")
        self.set_timesteps(1)

    def set_timesteps(self, num_inference_steps: int, device: torch.device | str | None = None) -> None:
        """A grid of this many steps; the next call of `step` begins at its start."""
        self.sigmas = parse_grid(self.config.grid)(num_inference_steps, LinearFlow())  # float64 on the CPU, as ours are
        self.timesteps = self.sigmas[:-1] * self.config.num_train_timesteps
        self.num_inference_steps = num_inference_steps
        self._walk: Walk | None = None
        self._state: Tensor | None = None

    def step(
        self,
        model_output: Tensor,
        timestep: Tensor | float,
        sample: Tensor,
        generator: torch.Generator | Sequence[torch.Generator] | None = None,
        return_dict: bool = True,
    ) -> SchedulerOutput | tuple[Tensor]:
        """One step of the solver, which receives the velocity `model_output`.

        With a list of generators the stochastic solver draws the noise of their seeds, as `atoll sample` does.
        """
        if self._walk is None:
            noise = partial(_step_noise, generator, sample)
            self._walk = SOLVERS[self.config.solver](sample, GridPath(LinearFlow(), self.sigmas), noise)
            self._state, _ = next(self._walk)
        elif self._state is not None and sample is not self._state:
            self._state.copy_(sample)  # latents that were changed between two steps
        try:
            self._state, _ = self._walk.send(model_output)
        except StopIteration as end:
            self._state = end.value
        return SchedulerOutput(prev_sample=self._state) if return_dict else (self._state,)

    def scale_model_input(self, sample: Tensor, timestep: Tensor | None = None) -> Tensor:
        return sample

    def __len__(self) -> int:
        return int(self.config.num_train_timesteps)


def _step_noise(generator: Any, sample: Tensor, index: int) -> Tensor:
    """Noise of one solver step, shaped like `sample`: of the seeds of a list, or drawn from one generator."""
    if isinstance(generator, list | tuple):
        return step_noise([one.initial_seed() for one in generator], sample.shape[1:], index)
    noise: Tensor = randn_tensor(sample.shape, generator=generator, device=sample.device, dtype=sample.dtype)
    return noise


class PipelineMethods:
    """The pipeline without its components, which the end of the bundle adds.

    `self.config.atoll` holds the latent and text space, the ensemble's own record, and the model card.
    """

    config: Any
    scheduler: Any
    vae: Any
    text_encoder: Any
    tokenizer: Any
    router: Any
    expert_names: tuple[str, ...]
    progress_bar: Any
    _execution_device: torch.device

    @torch.no_grad()
    def __call__(
        self,
        prompt: Prompts | None = None,
        num_inference_steps: int = 50,
        guidance_scale: float = 2.0,
        negative_prompt: Prompts | None = None,
        num_images_per_prompt: int = 1,
        generator: torch.Generator | Sequence[torch.Generator] | None = None,
        latents: Tensor | None = None,
        route: str | None = None,
        route_every: int = 1,
        guidance_weights: str = "own",
        guidance_interval: tuple[float, float] | None = None,
        output_type: str = "pil",
        return_dict: bool = True,
        callback_on_step_end: Callable[..., dict[str, Any]] | None = None,
        callback_on_step_end_tensor_inputs: Sequence[str] = ("latents",),
    ) -> ImagePipelineOutput | tuple[Any]:
        """Generate images.

        prompt                 a text, or for a model of labels a class by name or number; or a list of them
        num_inference_steps    steps of the scheduler
        guidance_scale         classifier-free guidance; 1 is none
        negative_prompt        what to guide away from, instead of from no prompt
        generator              one, or a list with one per image; `torch.Generator().manual_seed(seed + i)` for image i
                               gives the images of `atoll sample --seed`
        latents                normalized noise [N, C, H, W] instead of drawing it
        route                  which experts run: top-K, full, threshold-P, fixed; default: the model's own
        route_every            run the router at every n-th step only
        guidance_weights       own (exact) or conditional (cheaper): the experts of the unconditional half
        guidance_interval      guide only where low <= t <= high; t = 1 is noise
        output_type            pil, np, pt or latent (normalized)
        callback_on_step_end   called as (pipeline, step, timestep, {"latents": ...}); may return other latents
        """
        device = self._execution_device
        prompts = self._prompts(prompt, num_images_per_prompt)
        condition = self.encode(prompts, device)
        if negative_prompt is not None:
            if condition is None:
                raise ValueError("negative_prompt: this model was trained without text; leave it out")
            away = self._prompts(negative_prompt, num_images_per_prompt)
            if len(away) not in (num_images_per_prompt, len(prompts)):
                given = len(away) // num_images_per_prompt
                raise ValueError(f"negative_prompt: give one, or one for each prompt; got {given}")
            opposite = self.encode(away * (len(prompts) // len(away)), device)
            assert opposite is not None, "a model that takes a prompt takes a negative one"
            condition = NegativeCondition(**condition.tensors(), negative=opposite)
        if unknown := set(callback_on_step_end_tensor_inputs) - {"latents"}:
            raise ValueError(f"callback_on_step_end_tensor_inputs: latents are all there is, got {sorted(unknown)}")
        self._interrupt = False  # a callback may set it

        sigmas, timesteps = self._times(num_inference_steps, device)
        extra = {"generator": generator} if "generator" in signature(self.scheduler.step).parameters else {}

        def walk(x: Tensor, path: GridPath, noise: StepNoise) -> Walk:
            """The scheduler as a solver."""
            for index, timestep in enumerate(timesteps):
                if self._interrupt:
                    break
                velocity = yield x, path.t[index]
                x = self.scheduler.step(velocity, timestep, x, **extra, return_dict=False)[0]
                if callback_on_step_end is not None:
                    x = callback_on_step_end(self, index, timestep, {"latents": x}).pop("latents", x)
                bar.update()
            return x

        sampling = Sampling(
            steps=len(timesteps),
            guidance=guidance_scale if condition is not None else 1.0,
            guidance_interval=guidance_interval,
            guidance_weights=guidance_weights,  # type: ignore[arg-type]
            route_every=route_every,
        )
        noise = self._noise(len(prompts), generator, latents, device)
        request = Request(_seeds(generator, len(prompts)), condition, sampling)
        request.solver, request.times, request.noise = walk, torch.tensor(sigmas, dtype=torch.float64), noise
        engine = Engine(self.denoiser(route), noise.shape[1:], max_images=len(prompts), device=device)
        with self.progress_bar(total=len(timesteps)) as bar:
            engine.admit(request)
            while len(engine):
                engine.round()
        x = request.latents
        assert x is not None, "the engine is done"
        images = x if output_type == "latent" else self._decode(x, output_type)
        return ImagePipelineOutput(images=images) if return_dict else (images,)

    @property
    def experts(self) -> list[AtollExpert]:
        """Expert k is the one of cluster k."""
        return [getattr(self, name) for name in self.expert_names]

    def denoiser(self, route: str | None = None) -> Denoiser:
        """The model as one denoiser on the sampling path."""
        bridges = []
        for expert in self.experts:
            card = expert.config.card
            schedule, scale = schedule_of(card["schedule"]), card["architecture"]["time_scale"]
            own = NetworkDenoiser(expert, schedule, Kind(card["kind"]), scale)
            bridges.append(Bridge(own, onto=LinearFlow(), limit=card["bridge_limit"]))
        if self.router is None:
            if route is not None:
                raise ValueError(f"route {route!r}: this is a single expert, there is nothing to route; leave it out")
            return bridges[0]
        time_scale = self.router.config.card["architecture"]["trunk"]["time_scale"]
        weights = partial(cluster_weights, self.router, time_scale)
        return Mixture(Denoisers(bridges), weights, parse_route(route or self.config.atoll["ensemble"]["route"]))

    def encode(self, prompts: Sequence[str | int], device: torch.device) -> Condition | None:
        """Prompts as the condition the networks read; None for a model without one."""
        text, card = self.config.atoll["text"], self.experts[0].config.card
        if text is not None:
            captions = [str(prompt) for prompt in prompts]
            if text["kind"] == "words":
                ids = {word: number for number, word in enumerate(text["vocabulary"])}
                found = word_ids(captions, ids, text["length"])
            else:
                kind, length = text["kind"], text["length"]
                found = encode_text(self.tokenizer, self.text_encoder, captions, kind=kind, length=length)
            return Condition(**found).to(device)
        if (classes := card["architecture"]["classes"]) is not None:
            names = (self.config.atoll["ensemble"] or card).get("class_names")
            labels = [class_number(prompt, classes, names) for prompt in prompts]
            return Condition(labels=torch.tensor(labels, device=device))
        if any(prompt != "" for prompt in prompts):
            raise ValueError(f"prompt {prompts[0]!r}: this model was trained without text; leave the prompt out")
        return None

    def _prompts(self, prompt: Prompts | None, each: int) -> list[str | int]:
        """One prompt per image."""
        conditional = self.config.atoll["text"] is not None or self.experts[0].config.card["architecture"]["classes"]
        if prompt is None and conditional:
            raise ValueError("prompt: missing; give a text, or the class of a model of labels")
        given = [""] if prompt is None else [prompt] if isinstance(prompt, str | int) else list(prompt)
        return [one for one in given for _ in range(each)]

    def _noise(self, count: int, generator: Any, latents: Tensor | None, device: torch.device) -> Tensor:
        """Standard normal noise [count, C, H, W], float32 whatever the networks compute in."""
        if isinstance(generator, list | tuple) and len(generator) != count:
            raise ValueError(f"generator: {count} images need one, or a list of {count}, got {len(generator)}")
        shape = (count, *self.config.atoll["latent"]["shape"])
        if latents is None:
            drawn: Tensor = randn_tensor(shape, generator=generator, device=device, dtype=torch.float32)
            return drawn
        if tuple(latents.shape) != shape:
            raise ValueError(f"latents: {count} images need the shape {list(shape)}, got {list(latents.shape)}")
        return latents.to(device, torch.float32)

    def _times(self, steps: int, device: torch.device) -> tuple[list[float], Tensor]:
        """The scheduler's sigmas, which are our times, and its own timesteps; equal steps of t where it takes them."""
        scheduler = self.scheduler
        config = scheduler.config
        if isinstance(scheduler, AtollScheduler):
            scheduler.set_timesteps(steps)
            return scheduler.sigmas.tolist(), scheduler.timesteps
        flows = "FlowMatch" in type(scheduler).__name__ or config.get("use_flow_sigmas")
        if not flows or config.get("prediction_type", "flow_prediction") != "flow_prediction":
            raise ValueError(
                f"scheduler {type(scheduler).__name__}: this model gives the velocity of a straight path; use "
                "FlowMatchEulerDiscreteScheduler, or another with use_flow_sigmas and prediction_type='flow_prediction'"
            )
        if "sigmas" in signature(scheduler.set_timesteps).parameters:
            scheduler.set_timesteps(sigmas=parse_grid("uniform")(steps, LinearFlow())[:-1].tolist(), device=device)
        else:
            scheduler.set_timesteps(steps, device=device)
        return scheduler.sigmas.tolist(), scheduler.timesteps

    def _decode(self, x: Tensor, output_type: str) -> Any:
        """Normalized latents [N, C, H, W] as images of the requested type."""
        latent = self.config.atoll["latent"]
        mean, scale = (torch.tensor(latent[name], device=x.device).view(1, -1, 1, 1) for name in ("mean", "scale"))
        images = x * scale + mean
        if self.vae is not None:
            images = self.vae.decode(images.to(self.vae.dtype)).sample.float()
        return VaeImageProcessor().postprocess(images, output_type=output_type)

    def save_pretrained(self, save_directory: str | Path) -> None:
        """Write a folder that loads again: every component with this code beside it, the index, and the model card."""
        folder, module = Path(save_directory), sys.modules[type(self).__module__]
        name = module.__name__.rpartition(".")[2]
        code = module.__spec__.loader.get_source(module.__name__)  # type: ignore[union-attr]
        folder.mkdir(parents=True, exist_ok=True)
        index: dict[str, Any] = {"_class_name": [name, type(self).__name__], "_diffusers_version": diffusers_version}
        files = {folder / f"{name}.py": code, folder / "README.md": self.config.atoll["card"]}
        for part, entry in self.config.items():
            if not isinstance(entry, list | tuple):
                continue
            index[part] = list(entry)
            component = getattr(self, part)
            component = getattr(component, "_orig_mod", component)  # what torch.compile has wrapped
            if component is None:
                continue
            component.save_pretrained(folder / part)
            if type(component).__module__ == __name__:
                index[part] = [name, type(component).__name__]
                files[folder / part / f"{name}.py"] = code
                config = folder / part / component.config_name
                settings = json.loads(config.read_bytes())
                settings.pop("_name_or_path", None)  # where it was loaded from
                files[config] = json.dumps(settings, indent=2, sort_keys=True) + "\n"
        files[folder / "model_index.json"] = json.dumps({**index, "atoll": self.config.atoll}, indent=2) + "\n"
        for path, text in files.items():
            path.write_text(text, encoding="utf-8")


def _seeds(generator: Any, count: int) -> list[int]:
    """A seed per image, for routes that draw: of each image's own generator, or drawn from the one there is."""
    if isinstance(generator, list | tuple):
        return [one.initial_seed() for one in generator]
    device = "cpu" if generator is None else generator.device
    drawn: list[int] = torch.randint(2**62, (count,), generator=generator, device=device).tolist()
    return drawn
