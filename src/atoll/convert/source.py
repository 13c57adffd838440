"""Foreign checkpoints, recognised: which network, which schedule, which kind, whose license."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import TypeAdapter
from torch import Tensor

from ..artifacts import UserError, sha256_file
from ..models.dit import NORM_EPS, DiTConfig, sincos_positions
from ..models.presets import heads_for
from ..process import AnySchedule, DDPMBetas, Kind, LinearFlow
from .checkpoint import read_checkpoint, read_json
from .layouts import Imported, Layout, import_weights

Form = Literal["dit", "sit", "pixart", "diffusers"]
SIDECAR = "atoll.json"
NULL_TEXT = "null_text.safetensors"
MOST_IMAGE_TOKENS = 65_536

# what the official releases are under; anything else must be said with --license
LICENSES = {"dit": "CC-BY-NC-4.0", "sit": "MIT", "pixart": "Apache-2.0"}


@dataclass(frozen=True)
class Source:
    """A foreign network, its weights under our names, still with its own meaning of time and output."""

    name: str
    form: Form
    layout: Layout
    config: DiTConfig
    imported: Imported
    schedule: AnySchedule
    kind: Kind
    reversed_time: bool  # SiT: time runs from noise (0) to data (1), and the velocity points the other way
    license: str
    digest: str  # sha256 of the weights file
    card: Mapping[str, Any] = field(default_factory=dict)  # of an expert that `export` wrote: its own card

    @property
    def non_commercial(self) -> bool:
        return bool(re.search(r"\bnc\b|non-?commercial", self.license.lower()))


def read_source(
    place: Path,
    form: Form,
    *,
    heads: int | None = None,
    latent: tuple[int, int, int] | None = None,
    license: str | None = None,
    null_text: Path | None = None,
) -> Source:
    """Read a checkpoint. `heads`, `latent` and `null_text` are needed only where the file does not say them."""
    if form == "diffusers":
        return _read_diffusers(place, license, null_text)
    foreign = read_checkpoint(place)
    layout: Layout = "pixart" if form == "pixart" else "dit"
    config, foreign, notes = _official_config(foreign, form, heads, latent, str(place))
    imported = import_weights(layout, config, foreign, str(place))
    imported.dropped.update(notes)
    if config.positions == "learned":
        imported.weights["patches.positions"] = foreign["pos_embed"].float().reshape(config.image_tokens, config.width)
        imported.sources["patches.positions"] = ("pos_embed",)
        imported.dropped.pop("pos_embed", None)
    return Source(
        name=place.name,
        form=form,
        layout=layout,
        config=config,
        imported=imported,
        schedule=LinearFlow() if form == "sit" else DDPMBetas("linear"),
        kind=Kind.VELOCITY if form == "sit" else Kind.EPSILON,
        reversed_time=form == "sit",
        license=license or LICENSES[form],
        digest=sha256_file(place),
    )


def _official_config(
    foreign: dict[str, Tensor], form: Form, heads: int | None, latent: tuple[int, int, int] | None, where: str
) -> tuple[DiTConfig, dict[str, Tensor], dict[str, str]]:
    """The architecture of an official file, from its shapes; and notes on tensors that need no place."""
    patches = _shaped(foreign, "x_embedder.proj.weight", 4, where)
    width, channels, patch, _ = patches.shape
    depth = _count_blocks(foreign, r"blocks\.(\d+)\.", where)
    heads = heads or heads_for(width)
    if heads is None:
        raise UserError(f"{where}: a network of width {width} is none of the known sizes; say how many --heads it has")
    outputs = _shaped(foreign, "final_layer.linear.weight", 2, where).shape[0]
    mlp_width = _shaped(foreign, "blocks.0.mlp.fc1.weight", 2, where).shape[0]
    extra = [name for name in foreign if name.startswith(("csize_embedder.", "ar_embedder."))]
    if extra:
        raise UserError(
            f"{where}: {extra[0]}: reads image size and aspect as conditions, which our network does not; "
            "use a 256 or 512 pixel checkpoint"
        )
    table = foreign.get("pos_embed")
    if latent is None:
        side = _square_side(table, width, where)
        latent = (channels, side * patch, side * patch)
    text = form == "pixart"
    labels = None if text else _shaped(foreign, "y_embedder.embedding_table.weight", 2, where).shape[0] - 1
    null = _shaped(foreign, "y_embedder.y_embedding", 2, where).shape if text else None
    config = _checked(
        where,
        latent=latent,
        patch=patch,
        width=width,
        depth=depth,
        heads=heads,
        mlp_ratio=mlp_width / width,
        variant="adaln-single" if text else "adaln",
        condition="tokens" if text else "labels",
        classes=labels,
        text_width=None if null is None else null[1],
        text_length=None if null is None else null[0],
        out_channels=outputs // patch**2,
        time_scale=1.0 if form == "sit" else 999.0,
    )
    notes: dict[str, str] = {}
    if table is not None:
        config, notes = _recognise_positions(config, table, where)
    return config, foreign, notes


def _recognise_positions(config: DiTConfig, table: Tensor, where: str) -> tuple[DiTConfig, dict[str, str]]:
    """A stored table that is the fixed sin-cos one is computed instead; any other one is kept as weights."""
    if table.numel() != config.image_tokens * config.width:
        raise UserError(
            f"{where}: pos_embed {list(table.shape)} does not fit the latent {config.latent}; check --latent"
        )
    flat = table.float().reshape(config.image_tokens, config.width)
    for scale in (1.0, 2.0, 4.0, 0.5):
        if torch.allclose(flat, sincos_positions(config.grid, config.width, scale), atol=1e-4):
            return replace(config, position_scale=scale), {"pos_embed": "the fixed sin-cos table, computed here"}
    return replace(config, positions="learned"), {}


def _read_diffusers(place: Path, license: str | None, null_text_file: Path | None) -> Source:
    """A `DiTTransformer2DModel` or `PixArtTransformer2DModel` folder, or a pipeline folder that holds one."""
    folder = place / "transformer" if (place / "transformer").is_dir() else place
    if not folder.is_dir():
        raise UserError(f"{place}: not a folder; --from diffusers takes a folder saved with save_pretrained")
    settings = read_json(folder / "config.json")
    layout = _diffusers_layout(settings, str(folder))
    weights = folder / "diffusion_pytorch_model.safetensors"
    if not weights.is_file():
        weights = weights.with_suffix(".bin")
    if not weights.is_file():
        raise UserError(f"{folder}: holds no diffusion_pytorch_model.safetensors or .bin; save the model in one file")
    foreign = read_checkpoint(weights)
    card = _sidecar_card(folder)
    null_text = _null_text(null_text_file or folder / NULL_TEXT, required=null_text_file is not None)
    config = _diffusers_config(settings, foreign, layout, null_text, card, str(folder))
    imported = import_weights(layout, config, foreign, str(folder))
    if layout == "diffusers-pixart" and null_text is not None:
        imported.weights["conditioning.null_text"] = null_text.float().contiguous()
        imported.sources["conditioning.null_text"] = (NULL_TEXT,)
    schedule, kind = _diffusers_process(place, card)
    license = license or card.get("license") or _model_card_license(place)
    if license is None:
        raise UserError(f"{place}: names no license; say it with --license, such as --license Apache-2.0")
    return Source(
        name=place.name,
        form="diffusers",
        layout=layout,
        config=config,
        imported=imported,
        schedule=schedule,
        kind=kind,
        reversed_time=False,
        license=str(license),
        digest=sha256_file(weights),
        card=card,
    )


def _diffusers_layout(settings: Mapping[str, Any], where: str) -> Layout:
    """Which of the two networks a folder holds; older folders call both Transformer2DModel."""
    name, norm = settings.get("_class_name"), settings.get("norm_type")
    if name == "DiTTransformer2DModel" or (name, norm) == ("Transformer2DModel", "ada_norm_zero"):
        return "diffusers-dit"
    if name == "PixArtTransformer2DModel" or (name, norm) == ("Transformer2DModel", "ada_norm_single"):
        return "diffusers-pixart"
    raise UserError(f"{where}: holds a {name}; only DiTTransformer2DModel and PixArtTransformer2DModel are read")


def _sidecar_card(folder: Path) -> dict[str, Any]:
    """The card that `export` left beside the weights; empty for anybody else's folder."""
    if not (folder / SIDECAR).is_file():
        return {}
    card = read_json(folder / SIDECAR).get("card")
    if not isinstance(card, dict) or not isinstance(card.get("architecture"), dict):
        raise UserError(f"{folder / SIDECAR}: holds no expert card; export the expert again, or remove this file")
    return card


def _null_text(path: Path, *, required: bool) -> Tensor | None:
    """The embedding of the null caption, [length, width]."""
    if not required and not path.is_file():
        return None
    found = read_checkpoint(path)
    value = found.get("null_text") if len(found) > 1 else next(iter(found.values()), None)
    if value is None or value.ndim != 2:
        raise UserError(f"{path}: must hold one tensor of shape [length, width], the embedding of the empty caption")
    return value


def _diffusers_config(
    settings: Mapping[str, Any],
    foreign: Mapping[str, Tensor],
    layout: Layout,
    null_text: Tensor | None,
    card: Mapping[str, Any],
    where: str,
) -> DiTConfig:
    dit = layout == "diffusers-dit"
    ours = {
        "activation_fn": "gelu-approximate",
        "attention_bias": True,
        "norm_elementwise_affine": False,
        "norm_type": "ada_norm_zero" if dit else "ada_norm_single",
    }
    if not dit:
        ours["norm_eps"] = NORM_EPS
    for key, wanted in ours.items():
        if (found := settings.get(key, wanted)) != wanted:
            raise UserError(f"{where}: {key} is {found!r}, our network has {wanted!r}; this model cannot be converted")
    patches = _shaped(foreign, "pos_embed.proj.weight", 4, where)
    width, channels, patch, _ = patches.shape
    size = _integer(settings, "sample_size", 32 if dit else 128, where)
    additional = settings.get("use_additional_conditions")
    if additional or (not dit and additional is None and size == 128):  # None is on for 1024 px models in diffusers
        raise UserError(f"{where}: reads image size and aspect as conditions, which our network does not; refused")
    output = _shaped(foreign, "proj_out_2.weight" if dit else "proj_out.weight", 2, where).shape[0]
    classes = text_width = text_length = None
    if dit:
        name = "transformer_blocks.0.norm1.emb.class_embedder.embedding_table.weight"
        classes = _shaped(foreign, name, 2, where).shape[0] - 1
    else:
        text_width = _shaped(foreign, "caption_projection.linear_1.weight", 2, where).shape[1]
        text_length = len(null_text) if null_text is not None else 120
    interpolation = settings.get("interpolation_scale")
    if interpolation is None:
        interpolation = 1 if dit else max(size // 64, 1)
    architecture = card.get("architecture", {})  # what a diffusers config has no place for
    return _checked(
        where,
        latent=(channels, size, size),
        patch=patch,
        width=width,
        depth=_count_blocks(foreign, r"transformer_blocks\.(\d+)\.", where),
        heads=_integer(settings, "num_attention_heads", 16, where),
        mlp_ratio=4.0,
        variant="adaln" if dit else "adaln-single",
        condition="labels" if dit else "tokens",
        classes=classes,
        text_width=text_width,
        text_length=text_length,
        out_channels=output // patch**2,
        position_scale=float(interpolation),
        frequency_shift=architecture.get("frequency_shift", 1 if dit else 0),
        mlp_norm_eps=float(settings.get("norm_eps", 1e-5)) if dit else NORM_EPS,
        time_scale=architecture.get("time_scale", 999.0),
    )


def _diffusers_process(place: Path, card: Mapping[str, Any]) -> tuple[AnySchedule, Kind]:
    """Schedule and kind: from our own export's card, the pipeline's scheduler, else DDPM with linear betas."""
    if card:
        try:
            schedule: AnySchedule = TypeAdapter(AnySchedule).validate_python(card["schedule"])
            return schedule, Kind(card["kind"])
        except (KeyError, ValueError) as error:
            raise UserError(f"{place}/{SIDECAR}: schedule or kind cannot be read; export the expert again") from error
    path = place / "scheduler" / "scheduler_config.json"
    settings = read_json(path) if path.is_file() else {}
    found = (settings.get("beta_schedule", "linear"), settings.get("prediction_type", "epsilon"))
    steps = _integer(settings, "num_train_timesteps", 1000, str(path))
    kinds = {"epsilon": Kind.EPSILON, "sample": Kind.X0, "v_prediction": Kind.V}
    schedules = {
        "linear": DDPMBetas("linear", steps=steps),
        "scaled_linear": DDPMBetas("scaled_linear", steps=steps),
        "squaredcos_cap_v2": DDPMBetas("cosine", steps=steps),
    }
    if found[0] not in schedules or found[1] not in kinds:
        raise UserError(f"{path}: beta_schedule {found[0]!r} with prediction_type {found[1]!r} cannot be converted")
    return schedules[found[0]], kinds[found[1]]


def _model_card_license(place: Path) -> str | None:
    """`license:` in the front matter of a model card, if there is one."""
    for card in (place / "README.md", place.parent / "README.md"):
        if card.is_file():
            text = card.read_text(errors="replace")
            if found := re.search(r"^license:\s*(\S+)\s*$", text[:4000], re.MULTILINE):
                return found[1]
    return None


def _checked(where: str, **settings: Any) -> DiTConfig:
    channels, height, width = settings["latent"]
    tokens = (height // settings["patch"]) * (width // settings["patch"])
    if not 0 < tokens <= MOST_IMAGE_TOKENS:
        raise UserError(f"{where}: {tokens:,} image tokens is more than any network we read; refused")
    if settings["out_channels"] == channels:
        settings["out_channels"] = None
    try:
        return DiTConfig(**settings)
    except (ValueError, TypeError) as error:
        raise UserError(f"{where}: {error}") from error


def _shaped(foreign: Mapping[str, Tensor], name: str, axes: int, where: str) -> Tensor:
    value = foreign.get(name)
    if value is None:
        raise UserError(f"{where}: key {name} is missing; check --from")
    if name.endswith("y_embedding"):
        value = value.reshape(value.shape[-2:]) if value.ndim >= 2 else value
    if value.ndim != axes or min(value.shape) < 1:
        raise UserError(f"{where}: {name} has shape {list(value.shape)}, expected {axes} axes; check --from")
    return value


def _count_blocks(foreign: Mapping[str, Tensor], pattern: str, where: str) -> int:
    """How many blocks there are; their numbers must be 0, 1, 2 ... (a name from a stranger may say any number)."""
    found = {int(match[1]) for name in foreign if (match := re.match(pattern, name)) and len(match[1]) < 6}
    if found != set(range(len(found))) or not found:
        raise UserError(f"{where}: blocks are numbered {sorted(found)[:8]}, expected 0, 1, 2 ...; check --from")
    return len(found)


def _square_side(table: Tensor | None, width: int, where: str) -> int:
    if table is None:
        raise UserError(f"{where}: does not say its latent size; give it with --latent, such as 4x32x32")
    side = math.isqrt(table.numel() // width)
    if side * side * width != table.numel():
        raise UserError(f"{where}: pos_embed {list(table.shape)} is not of a square latent; give --latent")
    return side


def _integer(settings: Mapping[str, Any], key: str, default: int, where: str) -> int:
    value = settings.get(key, default)
    if isinstance(value, int) and not isinstance(value, bool) and 0 < value <= 1_000_000:
        return int(value)
    raise UserError(f"{where}: {key} is {value!r}, expected a whole number; get the model again")
