"""The convert stage: a foreign checkpoint becomes an expert, as it is or as the start of another one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import ValidationError

from ..artifacts import Artifact, UserError, canonical_json, explain, load_if_same
from ..data.space import LatentConfig, TextConfig
from ..islands.expert import KIND, ExpertCard, write_expert
from ..models.dit import DiT, DiTConfig
from ..process import EDM, AnySchedule, CosineVP, DDPMBetas, Kind, LinearFlow
from .report import Report
from .source import Source
from .time_conversion import ImportedNetwork, keep_mean, reverse_time
from .warm_start import warm_start

REPORT = "conversion.json"
FinalLayer = Literal["new", "bridge"]

# what an exported expert's card says beyond its network
HISTORY = ("bridge_limit", "cluster", "images", "order", "partition", "origin")

SCHEDULES: dict[str, AnySchedule] = {
    "linear-flow": LinearFlow(),
    "cosine-vp": CosineVP(),
    "ddpm-linear": DDPMBetas("linear"),
    "ddpm-scaled-linear": DDPMBetas("scaled_linear"),
    "ddpm-cosine": DDPMBetas("cosine"),
    "edm": EDM(),
}


@dataclass(frozen=True, kw_only=True)
class Target:
    """What a warm start is to become.

    `final` decides about a source of another schedule or kind. new: the final layer starts from zero and the
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
    """A finished conversion: the expert, its card, and what became of every tensor."""

    artifact: Artifact
    card: ExpertCard
    report: Report = field(compare=False)


def convert(
    source: Source, out: Path, *, latent: LatentConfig, text: TextConfig | None, target: Target | None = None
) -> Conversion:
    """Write `source` as an expert to `out`; without a `target` it keeps its own schedule, kind and architecture."""
    report = Report()
    trained = in_our_convention(source, report)
    origin = f"{source.form} checkpoint, sha256 {source.digest[:12]}"
    if target is not None:
        trained, changes = start_from(trained, target)
        report = follow(report, changes)
        labels = "labels kept" if target.keep_labels else "labels new"
        origin = f"warm start from a {origin}, {target.final} final layer, {labels}, seed {target.seed}"
        if source.non_commercial:
            origin += "; its weights are for non-commercial use only"
    for name, why in source.imported.dropped.items():
        report.add(None, (name,), "dropped", why)
    check_spaces(trained.config, latent, text)

    card = ExpertCard(
        architecture=trained.config,
        schedule=trained.schedule,
        kind=trained.kind,
        latent=latent,
        text=text,
        images=0,
        origin=origin,
        license=source.license,
    )
    if target is None and source.card:  # one of ours comes back: it is still the expert it was
        kept = {name: source.card[name] for name in HISTORY if name in source.card}
        card = parse_card({**card.model_dump(mode="json"), **kept}, source.name)
    parents = {"source": source.digest}
    there = load_if_same(out, KIND, card.model_dump(mode="json"), parents)
    if there is not None:
        return Conversion(there, card, report)
    if out.exists() and not out.is_dir():
        raise UserError(f"--out {out}: is a file; give a folder that does not exist yet")
    out.mkdir(parents=True, exist_ok=True)
    record = {"source": {"form": source.form, "sha256": source.digest}, "origin": origin, "keys": report.as_json()}
    extra = {REPORT: canonical_json(record) + b"\n"}
    return Conversion(write_expert(out, trained.weights, card, [], parents, extra), card, report)


def in_our_convention(source: Source, report: Report) -> ImportedNetwork:
    """The foreign network as the same function in our convention: time from data to noise, no variance."""
    weights, sources = dict(source.imported.weights), dict(source.imported.sources)
    if source.config.condition == "tokens" and "conditioning.null_text" not in weights:
        fresh = DiT(source.config, torch.Generator().manual_seed(0)).state_dict()
        weights["conditioning.null_text"] = fresh["conditioning.null_text"]
        note = "a diffusers folder keeps no null caption; give it with --null-text before using guidance"
        report.add("conditioning.null_text", (), "re-initialised", note)
    trained = ImportedNetwork(source.config, weights, source.schedule, source.kind, sources)
    if source.reversed_time:
        trained = reverse_time(trained, report)
    trained = keep_mean(trained, report)
    told = {entry.key for entry in report.entries}
    for key in trained.weights:
        if key not in told:
            report.add(key, trained.source(key), "kept")
    return trained


def start_from(trained: ImportedNetwork, target: Target) -> tuple[ImportedNetwork, Report]:
    keep_process = target.final == "bridge"
    schedule = trained.schedule if keep_process else target.schedule
    kind = trained.kind if keep_process else target.kind
    generator = torch.Generator().manual_seed(target.seed)
    try:
        return warm_start(
            trained, target.architecture, schedule, kind, generator=generator, keep_labels=target.keep_labels
        )
    except ValueError as error:
        raise UserError(f"--from: {error}") from error


def follow(first: Report, second: Report) -> Report:
    """The report of two steps: a tensor kept by the second has the fate the first one gave it."""
    before = {entry.key: entry for entry in first.entries}
    both = Report()
    for entry in second.entries:
        both.entries.append(before[entry.key] if entry.how == "kept" and entry.key in before else entry)
    return both


def own_spaces(
    source: Source, config: DiTConfig, *, autoencoder: str | None, latent_scale: float | None, text_encoder: str | None
) -> tuple[LatentConfig, TextConfig | None]:
    """The latent and text space of a converted network, from an exported expert's card where there is one."""
    card = parse_card(dict(source.card), source.name) if source.card else None
    if card is None:
        latent = _latent_of(config, autoencoder, latent_scale)
    else:
        refuse_unused({"--autoencoder": autoencoder, "--latent-scale": latent_scale}, "the exported expert has its own")
        latent = card.latent
    if config.condition not in ("tokens", "pooled", "words"):
        refuse_unused({"--text-encoder": text_encoder}, f"the network reads no text ({config.condition})")
        return latent, None
    length = config.text_length or 1
    if card is not None and card.text is not None:
        same = (card.text.kind, card.text.width) == (config.condition, config.text_width)
        if same and card.text.length in (config.text_length, card.text.length):
            refuse_unused({"--text-encoder": text_encoder}, "the exported expert has its own")
            return latent, card.text
    if text_encoder is None and source.form != "pixart":
        raise UserError("--text-encoder: missing; name the one that makes the text embeddings this network reads")
    kind: Literal["tokens", "pooled"] = "tokens" if config.condition == "tokens" else "pooled"
    encoder = text_encoder or "t5:DeepFloyd/t5-v1_1-xxl"
    return latent, TextConfig(encoder=encoder, kind=kind, length=length, width=config.text_width)


def _latent_of(config: DiTConfig, autoencoder: str | None, scale: float | None) -> LatentConfig:
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
        std=(1.0 / scale,) * channels,
    )


def refuse_unused(options: Mapping[str, object], why: str) -> None:
    """Refuse the first of these options that is given: it would have no effect."""
    for name, value in options.items():
        if value is not None and value is not False:
            given = name if value is True else f"{name} {value}"
            raise UserError(f"{given}: {why}; leave it out")


def parse_card(values: dict[str, Any], where: str) -> ExpertCard:
    try:
        return ExpertCard.model_validate(values)
    except ValidationError as error:
        raise UserError(f"{where}: its expert card cannot be read ({explain(error)}); export it again") from error


def check_spaces(config: DiTConfig, latent: LatentConfig, text: TextConfig | None) -> None:
    if tuple(latent.shape) != tuple(config.latent):
        raise UserError(f"--latent: the network takes {config.latent}, the latent space has {tuple(latent.shape)}")
    needed = {"tokens": "tokens", "pooled": "pooled", "words": "words"}.get(config.condition)
    if (text.kind if text is not None else None) != needed:
        raise UserError(
            f"--text-encoder: a network conditioned on {config.condition} needs a text space of kind {needed}, "
            f"got {text.kind if text is not None else None}"
        )


def parse_objective(text: str) -> tuple[AnySchedule, Kind]:
    """`linear-flow:velocity` -> a schedule and a kind."""
    schedule, _, kind = text.partition(":")
    if schedule not in SCHEDULES or kind not in list(Kind):
        raise UserError(
            f"--objective {text}: write schedule:kind such as linear-flow:velocity; schedules are "
            f"{', '.join(SCHEDULES)}, kinds {', '.join(Kind)}"
        )
    return SCHEDULES[schedule], Kind(kind)
