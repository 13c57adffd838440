"""Foreign checkpoints: which network, schedule and prediction type, and whose license."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor

from ..artifacts import UserError, explain, sha256_file
from ..diffusion import DDPMBetas, Kind, LinearFlow
from ..islands.expert import ExpertCard
from ..models.dit import NORM_EPS, DiT, DiTConfig, sincos_positions
from ..models.presets import heads_for
from .checkpoint import read_checkpoint, read_json
from .imported import Fate, ImportedNetwork
from .layouts import LAYOUTS, Layout, import_weights
from .time_conversion import keep_mean, reverse_time

Form = Literal["dit", "sit", "pixart", "diffusers"]
SIDECAR = "atoll.json"
NULL_TEXT = "null_text.safetensors"
NULL_KEY = "conditioning.null_text"
MOST_IMAGE_TOKENS = 65_536
SIZE_CONDITIONS = "reads image size and aspect as conditions, which our network does not"

# of the official releases; any other is given with --license
LICENSES = {"dit": "CC-BY-NC-4.0", "sit": "MIT", "pixart": "Apache-2.0"}

Count = Annotated[int, Field(gt=0, le=1_000_000)]
Settings = TypeVar("Settings", bound=BaseModel)


@dataclass(frozen=True)
class Source:
    """A foreign network in our convention (t = 0 is data, no variance), and what its files say about it."""

    name: str
    form: Form
    network: ImportedNetwork
    license: str
    digest: str  # sha256 of the weights file
    card: ExpertCard | None = None  # of an expert that `export` wrote

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
    """Read a checkpoint. `heads`, `latent` and `null_text` are needed only where the files do not hold them."""
    if form == "diffusers":
        return _read_diffusers(place, license, null_text)
    foreign, where = read_checkpoint(place), str(place)
    if extra := [name for name in foreign if name.startswith(("csize_embedder.", "ar_embedder."))]:
        raise UserError(f"{where}: {extra[0]}: {SIZE_CONDITIONS}; use a 256 or 512 pixel checkpoint")
    layout: Layout = "pixart" if form == "pixart" else "dit"
    schedule, kind = (LinearFlow(), Kind.VELOCITY) if form == "sit" else (DDPMBetas("linear"), Kind.EPSILON)
    config = _config(layout, foreign, where, latent=latent, heads=heads, time_scale=1.0 if form == "sit" else 999.0)
    network = import_weights(layout, config, schedule, kind, foreign, where)
    if "pos_embed" in foreign:
        network = _with_positions(network, foreign["pos_embed"], where)
    if form == "sit":  # time runs from noise to data there
        network = reverse_time(network)
    return Source(place.name, form, keep_mean(network), license or LICENSES[form], sha256_file(place))


def _config(
    layout: Layout,
    foreign: Mapping[str, Tensor],
    where: str,
    *,
    latent: tuple[int, int, int] | None = None,
    side: int | None = None,
    heads: int | None = None,
    **given: Any,
) -> DiTConfig:
    """The architecture, from the shapes of a file's tensors and from what is `given`."""

    def shape(ours: str, axes: int = 2) -> tuple[int, ...]:
        """Shape of the foreign tensor that stands for one of ours."""
        name = LAYOUTS[layout][ours].partition(" ")[0].replace("*", "0")
        name = name if name in foreign else f"{name}.weight"
        if name not in foreign:
            raise UserError(f"{where}: key {name} is missing; check --from")
        found = tuple(foreign[name].shape)
        if len(found) != axes or min(found) < 1:
            raise UserError(f"{where}: {name} has shape {list(found)}, expected {axes} axes; check --from")
        return found

    width, channels, patch, _ = shape("patches.project", 4)
    heads = heads or heads_for(width)
    if heads is None:
        raise UserError(f"{where}: a network of width {width} is none of the known sizes; say how many --heads it has")
    if latent is None and side is None:
        if "pos_embed" not in foreign:
            raise UserError(f"{where}: does not hold its latent size; give it with --latent, such as 4x32x32")
        side = math.isqrt(foreign["pos_embed"].numel() // width) * patch
    channels, height, across = latent or (channels, side or 0, side or 0)
    if not 0 < (tokens := (height // patch) * (across // patch)) <= MOST_IMAGE_TOKENS:
        raise UserError(f"{where}: has {tokens:,} image tokens, at most {MOST_IMAGE_TOKENS:,} are read; refused")
    if layout.endswith("dit"):
        reads = {"variant": "adaln", "condition": "labels", "classes": shape("conditioning.labels.weight")[0] - 1}
    else:
        reads = {"condition": "tokens", "text_width": shape("conditioning.text.enter")[1]}
        if layout == "pixart":
            reads["text_length"] = shape("conditioning.null_text")[0]
    # an untrusted name may hold any number
    pattern = LAYOUTS[layout]["blocks.*.attention.out"].partition("*")[0] + r"(\d{1,5})\."
    blocks = {int(match[1]) for name in foreign if (match := re.match(pattern, name))}
    if blocks != set(range(len(blocks))) or not blocks:
        raise UserError(f"{where}: blocks are numbered {sorted(blocks)[:8]}, expected 0, 1, 2 ...; check --from")
    outputs = shape("head.project")[0] // patch**2
    try:
        return DiTConfig(
            latent=(channels, height, across),
            patch=patch,
            width=width,
            depth=len(blocks),
            heads=heads,
            mlp_ratio=shape("blocks.*.mlp.enter")[0] / width,
            out_channels=None if outputs == channels else outputs,
            **{**reads, **given},
        )
    except (ValueError, TypeError) as error:
        raise UserError(f"{where}: {error}") from error


def _with_positions(network: ImportedNetwork, table: Tensor, where: str) -> ImportedNetwork:
    """A stored table that is the fixed sin-cos one is computed instead; any other is kept as weights."""
    config = network.config
    if table.numel() != config.image_tokens * config.width:
        raise UserError(
            f"{where}: pos_embed {list(table.shape)} does not fit the latent {config.latent}; give --latent"
        )
    flat = table.float().reshape(config.image_tokens, config.width)
    dropped = {name: why for name, why in network.dropped.items() if name != "pos_embed"}
    for scale in (1.0, 2.0, 4.0, 0.5):
        if torch.allclose(flat, sincos_positions(config.grid, config.width, scale), atol=1e-4):
            dropped["pos_embed"] = "the fixed sin-cos table, computed here"
            return replace(network, config=replace(config, position_scale=scale), dropped=dropped)
    weights = {**network.weights, "patches.positions": flat}
    fates = {**network.fates, "patches.positions": Fate("kept", ("pos_embed",))}
    return replace(network, config=replace(config, positions="learned"), weights=weights, fates=fates, dropped=dropped)


class TransformerSettings(BaseModel):
    """config.json of a diffusers transformer. A fixed value is what our network has."""

    model_config = ConfigDict(strict=True)
    sample_size: Count
    norm_eps: float
    num_attention_heads: Count = 16
    activation_fn: Literal["gelu-approximate"] = "gelu-approximate"
    attention_bias: Literal[True] = True
    norm_elementwise_affine: Literal[False] = False
    use_additional_conditions: bool | None = None
    interpolation_scale: float | None = None


class DiTSettings(TransformerSettings):
    sample_size: Count = 32
    norm_type: Literal["ada_norm_zero"] = "ada_norm_zero"
    norm_eps: float = 1e-5


class PixArtSettings(TransformerSettings):
    sample_size: Count = 128
    norm_type: Literal["ada_norm_single"] = "ada_norm_single"
    norm_eps: float = Field(NORM_EPS, ge=NORM_EPS, le=NORM_EPS)


class SchedulerSettings(BaseModel):
    """scheduler_config.json of a pipeline: how its network was trained."""

    model_config = ConfigDict(strict=True)
    beta_schedule: Literal["linear", "scaled_linear", "squaredcos_cap_v2"] = "linear"
    prediction_type: Literal["epsilon", "sample", "v_prediction"] = "epsilon"
    num_train_timesteps: int = Field(1000, ge=2, le=1_000_000)

    def process(self) -> tuple[DDPMBetas, Kind]:
        """Schedule and prediction type."""
        kinds = {"epsilon": Kind.EPSILON, "sample": Kind.X0, "v_prediction": Kind.V}
        betas = "cosine" if self.beta_schedule == "squaredcos_cap_v2" else self.beta_schedule
        return DDPMBetas(betas, steps=self.num_train_timesteps), kinds[self.prediction_type]


def _settings(model: type[Settings], values: Any, path: Path) -> Settings:
    """Validated settings, or one line about the first that does not fit."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise UserError(f"{path}: {explain(error)}; this model cannot be converted") from error


def _read_diffusers(place: Path, license: str | None, null_text: Path | None) -> Source:
    """A `DiTTransformer2DModel` or `PixArtTransformer2DModel` folder, or a pipeline folder that holds one."""
    folder = place / "transformer" if (place / "transformer").is_dir() else place
    if not folder.is_dir():
        raise UserError(f"{place}: not a folder; --from diffusers takes a folder saved with save_pretrained")
    values = read_json(folder / "config.json")
    name, norm = values.get("_class_name"), values.get("norm_type")
    if name == "Transformer2DModel":  # both networks in older folders
        name = {"ada_norm_zero": "DiTTransformer2DModel", "ada_norm_single": "PixArtTransformer2DModel"}.get(str(norm))
    if name not in ("DiTTransformer2DModel", "PixArtTransformer2DModel"):
        raise UserError(f"{folder}: only DiTTransformer2DModel and PixArtTransformer2DModel can be converted")
    dit = name == "DiTTransformer2DModel"
    settings = _settings(DiTSettings if dit else PixArtSettings, values, folder / "config.json")
    weights = folder / "diffusion_pytorch_model.safetensors"
    weights = weights if weights.is_file() else weights.with_suffix(".bin")
    foreign = read_checkpoint(weights)
    card = None
    if (folder / SIDECAR).is_file():
        card = _settings(ExpertCard, read_json(folder / SIDECAR).get("card"), folder / SIDECAR)
        schedule, kind = card.schedule, card.kind
    else:
        path = place / "scheduler" / "scheduler_config.json"
        schedule, kind = _settings(SchedulerSettings, read_json(path) if path.is_file() else {}, path).process()
    null = None if dit else _null_text(folder, null_text)
    size, conditioned = settings.sample_size, settings.use_additional_conditions
    if conditioned or (not dit and conditioned is None and size == 128):  # None is on for 1024 px models in diffusers
        raise UserError(f"{folder}: {SIZE_CONDITIONS}; refused")
    given: dict[str, Any] = {
        "position_scale": settings.interpolation_scale or float(1 if dit else max(size // 64, 1)),
        "mlp_norm_eps": settings.norm_eps,
        "frequency_shift": 1 if dit else 0,
    }
    if not dit:
        given["text_length"] = 120 if null is None else len(null)
    if card is not None:  # what a diffusers config has no place for
        own = card.architecture
        given |= {"frequency_shift": own.frequency_shift, "time_scale": own.time_scale}
    layout: Layout = "diffusers-dit" if dit else "diffusers-pixart"
    config = _config(layout, foreign, str(folder), side=size, heads=settings.num_attention_heads, **given)
    network = import_weights(layout, config, schedule, kind, foreign, str(folder))
    if not dit:
        network = _with_null_text(network, null)
    license = license or (card.license if card else None) or _model_card_license(place)
    if license is None:
        raise UserError(f"{place}: names no license; give it with --license, such as --license Apache-2.0")
    return Source(place.name, "diffusers", keep_mean(network), license, sha256_file(weights), card)


def _null_text(folder: Path, given: Path | None) -> Tensor | None:
    """The embedding of the null caption [length, width]: from the file that is given, or the one that lies there."""
    path = given or folder / NULL_TEXT
    if given is None and not path.is_file():
        return None
    found = read_checkpoint(path)
    value = found.get("null_text", next(iter(found.values())))
    if value.ndim != 2:
        raise UserError(f"{path}: must hold one tensor of shape [length, width], the embedding of the empty caption")
    return value.float().contiguous()


def _with_null_text(network: ImportedNetwork, null: Tensor | None) -> ImportedNetwork:
    """The network with its null caption, which has no place in a diffusers folder."""
    fate = Fate("kept", (NULL_TEXT,))
    if null is None:
        null = DiT(replace(network.config, depth=1), torch.Generator().manual_seed(0)).state_dict()[NULL_KEY]
        note = "a diffusers folder keeps no null caption; give it with --null-text before using guidance"
        fate = Fate("re-initialized", note=note)
    return replace(network, weights={**network.weights, NULL_KEY: null}, fates={**network.fates, NULL_KEY: fate})


def _model_card_license(place: Path) -> str | None:
    """`license:` in the front matter of a model card, if there is one."""
    for card in (place / "README.md", place.parent / "README.md"):
        text = card.read_text(errors="replace")[:4000] if card.is_file() else ""
        if found := re.search(r"^license:\s*(\S+)\s*$", text, re.MULTILINE):
            return found[1]
    return None
