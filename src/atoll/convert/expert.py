"""The convert stage: a foreign checkpoint becomes an expert, as it is or as the start of another one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from ..artifacts import Artifact, UserError, canonical_json, load_if_same
from ..data.space import LatentConfig, TextConfig
from ..diffusion import VE, AnySchedule, CosineVP, DDPMBetas, Kind, LinearFlow
from ..islands.expert import KIND, ExpertCard, write_expert
from ..models.dit import DiTConfig
from .imported import ImportedNetwork
from .source import Source
from .warm_start import warm_start

REPORT = "conversion.json"
FinalLayer = Literal["new", "bridge"]

SCHEDULES: dict[str, AnySchedule] = {
    "linear-flow": LinearFlow(),
    "cosine-vp": CosineVP(),
    "ddpm-linear": DDPMBetas("linear"),
    "ddpm-scaled-linear": DDPMBetas("scaled_linear"),
    "ddpm-cosine": DDPMBetas("cosine"),
    "ve": VE(),
}


@dataclass(frozen=True, kw_only=True)
class Target:
    """The network that a warm start makes.

    `final` is for a source of another schedule or prediction type. new: the final layer starts from zero and the
    network is trained for (schedule, kind) [HDDM]. bridge: schedule, kind and final layer stay the source's, and
    the loss of (schedule, kind) is taken through the bridge, so that it starts where it was.
    """

    architecture: DiTConfig
    schedule: AnySchedule
    kind: Kind
    final: FinalLayer = "new"
    keep_labels: bool = False  # labels and words mean the same as in the source's data
    seed: int = 0


@dataclass(frozen=True)
class Conversion:
    """A finished conversion: the expert, its card, and the network with what became of every tensor."""

    artifact: Artifact
    card: ExpertCard
    network: ImportedNetwork


def convert(
    source: Source, out: Path, *, latent: LatentConfig, text: TextConfig | None, target: Target | None = None
) -> Conversion:
    """Write `source` as an expert to `out`; without a `target` it keeps its own schedule, kind and architecture."""
    network = source.network
    origin = f"{source.form} checkpoint, sha256 {source.digest[:12]}"
    if target is not None:
        network = _start(network, target)
        labels = "labels kept" if target.keep_labels else "labels new"
        origin = f"warm start from a {origin}, {target.final} final layer, {labels}, seed {target.seed}"
        if source.non_commercial:
            origin += "; its weights are for non-commercial use only"
    if target is None and source.card is not None:  # an exported expert is still the expert it was
        card = source.card.model_copy(update={"architecture": network.config, "license": source.license})
    else:
        card = ExpertCard(
            architecture=network.config,
            schedule=network.schedule,
            kind=network.kind,
            latent=latent,
            text=text,
            images=0,
            origin=origin,
            license=source.license,
        )
    parents = {"source": source.digest}
    if (there := load_if_same(out, KIND, card.model_dump(mode="json"), parents)) is not None:
        return Conversion(there, card, network)
    if out.exists() and not out.is_dir():
        raise UserError(f"--out {out}: is a file; give a folder that does not exist yet")
    record = {"source": {"form": source.form, "sha256": source.digest}, "origin": origin, "keys": network.report()}
    extra = {REPORT: canonical_json(record) + b"\n"}
    return Conversion(write_expert(out, network.weights, card, [], parents, extra), card, network)


def _start(network: ImportedNetwork, target: Target) -> ImportedNetwork:
    """The warm start of a target, from the network in our convention."""
    schedule, kind = target.schedule, target.kind
    if target.final == "bridge":
        schedule, kind = network.schedule, network.kind
    generator = torch.Generator().manual_seed(target.seed)
    try:
        return warm_start(
            network, target.architecture, schedule, kind, generator=generator, keep_labels=target.keep_labels
        )
    except ValueError as error:
        raise UserError(f"--from: {error}") from error


def own_spaces(
    source: Source, config: DiTConfig, *, autoencoder: str | None, latent_scale: float | None, text_encoder: str | None
) -> tuple[LatentConfig, TextConfig | None]:
    """The latent and text space of a converted network, from an exported expert's card where there is one."""
    if source.card is None:
        latent = _official_latents(config, autoencoder, latent_scale)
    else:
        refuse_unused({"--autoencoder": autoencoder, "--latent-scale": latent_scale}, "the exported expert has its own")
        latent = source.card.latent
    if config.condition == "none" or config.condition == "labels":
        refuse_unused(
            {"--text-encoder": text_encoder}, f"the network reads no text (its condition: {config.condition})"
        )
        return latent, None
    own = None if source.card is None else source.card.text
    wanted = (config.condition, config.text_width, config.text_length)
    if own is not None and (own.kind, own.width, own.length if config.text_length else None) == wanted:
        refuse_unused({"--text-encoder": text_encoder}, "the exported expert has its own")
        return latent, own
    if text_encoder is None and source.form != "pixart":
        raise UserError("--text-encoder: missing; name the one that makes the text embeddings this network reads")
    return latent, TextConfig(
        encoder=text_encoder or "t5:DeepFloyd/t5-v1_1-xxl",
        kind=config.condition,
        length=config.text_length or 1,
        width=config.text_width,
    )


def _official_latents(config: DiTConfig, autoencoder: str | None, scale: float | None) -> LatentConfig:
    """Official networks were trained on Stable Diffusion's latents times 0.18215."""
    channels = config.latent[0]
    if autoencoder is None and channels != 4:
        raise UserError(f"--autoencoder: missing; name the one of these {channels}-channel latents, such as pixels")
    if scale is None:
        scale = 0.18215 if autoencoder is None else 1.0
    if not (math.isfinite(scale) and scale > 0):
        raise UserError(f"--latent-scale {scale}: must be a positive number, such as 0.18215")
    return LatentConfig(
        autoencoder=autoencoder or "stabilityai/sd-vae-ft-ema",
        shape=config.latent,
        mean=(0.0,) * channels,
        scale=(1.0 / scale,) * channels,
    )


def refuse_unused(options: Mapping[str, object], why: str) -> None:
    """Refuse the first of these options that is given: it would have no effect."""
    for name, value in options.items():
        if value is not None and value is not False:
            given = name if value is True else f"{name} {value}"
            raise UserError(f"{given}: {why}; leave it out")


def parse_objective(text: str) -> tuple[AnySchedule, Kind]:
    """`linear-flow:velocity` -> a schedule and a prediction type."""
    schedule, _, kind = text.partition(":")
    if schedule not in SCHEDULES or kind not in list(Kind):
        raise UserError(
            f"--objective {text}: write schedule:kind such as linear-flow:velocity; schedules are "
            f"{', '.join(SCHEDULES)}, kinds {', '.join(Kind)}"
        )
    return SCHEDULES[schedule], Kind(kind)
