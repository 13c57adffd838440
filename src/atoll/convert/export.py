"""Export one expert as a stock diffusers transformer, which `convert` reads back bit for bit.

config.json, diffusion_pytorch_model.safetensors   for diffusers
atoll.json                                         the expert's card: schedule, latent space, license ...
null_text.safetensors                              the learned null caption: the embedding of the negative prompt
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from ..artifacts import UserError, storage_errors
from ..diffusion import VE
from ..islands.expert import Expert, ExpertCard
from ..models.dit import NORM_EPS, DiTConfig
from .layouts import Layout, export_weights
from .source import NULL_KEY, NULL_TEXT, SIDECAR

# what every transformer of diffusers has
FIXED = {"qk_norm": False, "activation": "gelu-tanh", "positions": "sincos", "mlp_ratio": 4.0}


def export(expert: Expert, out: Path) -> list[str]:
    """Write the folder; the remarks are what a user of stock diffusers should know."""
    card, config = expert.card, expert.card.architecture
    layout, settings = diffusers_settings(config)
    weights = {name: value.detach().cpu() for name, value in expert.network.state_dict().items()}
    sidecar = {"expert": expert.digest, "card": card.model_dump(mode="json")}
    with new_folder(out) as folder:
        for name, content in (("config.json", settings), (SIDECAR, sidecar)):
            (folder / name).write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")
        tensors = export_weights(layout, config, weights)
        save_file(tensors, folder / "diffusion_pytorch_model.safetensors", metadata={"format": "pt"})
        if config.condition == "tokens":
            save_file({"null_text": weights[NULL_KEY]}, folder / NULL_TEXT)
    return remarks(card)


def diffusers_settings(config: DiTConfig) -> tuple[Layout, dict[str, Any]]:
    """The diffusers class that is this architecture, and its config; or one line on why there is none."""
    wanted: dict[str, object] = {**FIXED, "latent": (config.latent[0], config.latent[1], config.latent[1])}
    shared = {
        "_diffusers_version": "0.35.0",
        "num_attention_heads": config.heads,
        "attention_head_dim": config.width // config.heads,
        "in_channels": config.latent[0],
        "out_channels": config.channels_out,
        "num_layers": config.depth,
        "sample_size": config.latent[1],
        "patch_size": config.patch,
        "activation_fn": "gelu-approximate",
        "attention_bias": True,
        "norm_elementwise_affine": False,
        "norm_eps": config.mlp_norm_eps,
    }
    layout: Layout
    match config.variant, config.condition:
        case "adaln", "labels":
            layout, wanted["position_scale"] = "diffusers-dit", 1.0
            shared |= {"_class_name": "DiTTransformer2DModel", "norm_type": "ada_norm_zero"}
            shared |= {"num_embeds_ada_norm": config.classes}
        case "adaln-single", "tokens":
            layout, wanted["mlp_norm_eps"], wanted["frequency_shift"] = "diffusers-pixart", NORM_EPS, 0
            shared |= {"_class_name": "PixArtTransformer2DModel", "norm_type": "ada_norm_single"}
            shared |= {"cross_attention_dim": config.width, "caption_channels": config.text_width}
            shared |= {"interpolation_scale": config.position_scale, "use_additional_conditions": False}
        case variant, condition:
            raise UserError(
                f"--to transformer: diffusers has adaln with labels (DiT) and adaln-single with tokens (PixArt), this "
                f"expert is {variant} with {condition}; not exportable, use --to diffusers"
            )
    for name, value in wanted.items():
        if (found := getattr(config, name)) != value:
            raise UserError(
                f"--to transformer: {shared['_class_name']} has {name} {value}, this expert {found}; not exportable, "
                "use --to diffusers"
            )
    return layout, shared


def remarks(card: ExpertCard) -> list[str]:
    """What a user of stock diffusers should do differently, a line each."""
    config, found = card.architecture, []
    if config.condition == "labels" and config.frequency_shift == 0:
        found.append(
            "time frequencies have shift 0 and stock diffusers computes DiT's with shift 1, so its predictions differ "
            f"a little from this expert's; {SIDECAR} keeps the 0 for the way back"
        )
    if config.time_scale != 999.0:
        found.append(f"the network takes time {config.time_scale:g} t with t in [0, 1], not DDPM steps")
    if isinstance(card.schedule, VE):
        found.append("the network takes x / sqrt(1 + sigma^2), not x: scale the state before each call")
    if config.condition == "tokens":
        found.append(f"{NULL_TEXT} holds the null caption: pass it as the embedding of the negative prompt")
    return found


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """A folder to be filled. It is renamed to `out` at the end, and removed after an error."""
    if out.exists():
        raise UserError(f"--out {out}: already exists; give a folder that does not")
    partial = out.with_name(f".{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        with storage_errors(str(out)):
            partial.mkdir(parents=True)
            yield partial
            os.replace(partial, out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
