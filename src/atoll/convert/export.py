"""The export stage: an expert as a folder that diffusers loads, and that `convert` reads back bit for bit.

config.json                            for diffusers
diffusion_pytorch_model.safetensors    for diffusers
atoll.json                             what diffusers has no place for: schedule, kind, latent space, license ...
null_text.safetensors                  the learned null caption, to be used as the negative prompt's embedding
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from ..artifacts import UserError
from ..islands.expert import Expert, ExpertCard
from ..models.dit import NORM_EPS, DiTConfig
from ..process import EDM
from .layouts import Layout, export_weights
from .source import NULL_TEXT, SIDECAR


def export(expert: Expert, out: Path) -> list[str]:
    """Write the folder; the remarks are what a user of stock diffusers should know."""
    card, config = expert.card, expert.card.architecture
    layout, settings = diffusers_settings(config)
    if out.exists():
        raise UserError(f"--out {out}: already exists; give a folder that does not")
    weights = {name: value.detach().cpu() for name, value in expert.network.state_dict().items()}
    sidecar = {"expert": expert.digest, "card": card.model_dump(mode="json")}
    draft = out.with_name(f".{out.name}.partial")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    try:
        (draft / "config.json").write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n")
        (draft / SIDECAR).write_text(json.dumps(sidecar, indent=2, sort_keys=True) + "\n")
        save_file(
            export_weights(layout, config, weights),
            draft / "diffusion_pytorch_model.safetensors",
            metadata={"format": "pt"},
        )
        if config.condition == "tokens":
            save_file({"null_text": weights["conditioning.null_text"]}, draft / NULL_TEXT)
        os.replace(draft, out)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return remarks(card)


def diffusers_settings(config: DiTConfig) -> tuple[Layout, dict[str, Any]]:
    """The diffusers class that is this architecture, and its config; or one line on why there is none."""
    for name, value, wanted in (
        ("qk_norm", config.qk_norm, False),
        ("activation", config.activation, "gelu-tanh"),
        ("positions", config.positions, "sincos"),
        ("mlp_ratio", config.mlp_ratio, 4.0),
        ("latent height", config.latent[1], config.latent[2]),
    ):
        if value != wanted:
            raise UserError(
                f"--to transformer: its transformers have {name} {wanted}, this expert {value}; not exportable"
            )
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
    }
    if (config.variant, config.condition) == ("adaln", "labels"):
        if config.position_scale != 1.0:
            raise UserError(f"--to transformer: its DiT has position_scale 1, this expert {config.position_scale}")
        return "diffusers-dit", shared | {
            "_class_name": "DiTTransformer2DModel",
            "num_embeds_ada_norm": config.classes,
            "norm_type": "ada_norm_zero",
            "norm_eps": config.mlp_norm_eps,
        }
    if (config.variant, config.condition) == ("adaln-single", "tokens"):
        if config.mlp_norm_eps != NORM_EPS or config.frequency_shift != 0:
            raise UserError("--to transformer: its PixArt has mlp_norm_eps 1e-6 and frequency_shift 0, this expert not")
        return "diffusers-pixart", shared | {
            "_class_name": "PixArtTransformer2DModel",
            "cross_attention_dim": config.width,
            "caption_channels": config.text_width,
            "interpolation_scale": config.position_scale,
            "norm_type": "ada_norm_single",
            "norm_eps": NORM_EPS,
            "use_additional_conditions": False,
        }
    raise UserError(
        f"--to transformer: diffusers has adaln with labels (DiT) and adaln-single with tokens (PixArt), "
        f"this expert is {config.variant} with {config.condition}; not exportable"
    )


def remarks(card: ExpertCard) -> list[str]:
    config, found = card.architecture, []
    if config.condition == "labels" and config.frequency_shift == 0:
        found.append(
            "time frequencies have shift 0 and stock diffusers computes DiT's with shift 1, so its answers differ a "
            f"little from this expert's; {SIDECAR} keeps the 0 for the way back"
        )
    if config.time_scale != 999.0:
        found.append(f"the network takes time {config.time_scale:g} t with t in [0, 1], not DDPM steps")
    if isinstance(card.schedule, EDM):
        found.append("the network takes x / sqrt(1 + sigma^2), not x: scale the state before each call")
    if config.condition == "tokens":
        found.append(f"{NULL_TEXT} holds the null caption: pass it as the embedding of the negative prompt")
    return found
