"""Foreign networks at tiny size: real diffusers classes, and the official layouts written out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from atoll.models.dit import DiT, DiTConfig

CLASSES = 11
SIDE = 8


def randomize(module: nn.Module, seed: int = 0, std: float = 0.08) -> None:
    """Weights at which every part of a network matters; trained-looking rather than zero-initialised."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(0.0, std, generator=generator)


def diffusers_dit(*, tied: bool = True, **changes: Any) -> nn.Module:
    from diffusers import DiTTransformer2DModel

    settings: dict[str, Any] = {
        "num_attention_heads": 2, "attention_head_dim": 16, "in_channels": 4, "out_channels": 8, "num_layers": 3,
        "sample_size": SIDE, "patch_size": 2, "num_embeds_ada_norm": CLASSES,
    }  # fmt: skip
    model = DiTTransformer2DModel(**{**settings, **changes}).eval()
    randomize(model)
    if tied:
        for block in model.transformer_blocks:
            block.norm1.emb.load_state_dict(model.transformer_blocks[0].norm1.emb.state_dict())
    return model


def diffusers_pixart(**changes: Any) -> nn.Module:
    from diffusers import PixArtTransformer2DModel

    settings: dict[str, Any] = {
        "num_attention_heads": 2, "attention_head_dim": 16, "in_channels": 4, "out_channels": 8, "num_layers": 3,
        "sample_size": SIDE, "patch_size": 2, "cross_attention_dim": 32, "caption_channels": 24,
    }  # fmt: skip
    model = PixArtTransformer2DModel(**{**settings, **changes}).eval()
    randomize(model)
    return model


def save_diffusers(model: nn.Module, folder: Path) -> Path:
    model.save_pretrained(folder)  # type: ignore[operator]
    return folder


def official_dit(
    *, width: int = 32, depth: int = 3, channels: int = 4, patch: int = 2, seed: int = 0
) -> dict[str, Tensor]:
    """The key layout of a facebookresearch/DiT (and SiT) state dict, names and shapes as released."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return 0.08 * torch.randn(*shape, generator=generator)

    state = {
        "pos_embed": official_positions(width, SIDE // patch),
        "x_embedder.proj.weight": normal(width, channels, patch, patch),
        "x_embedder.proj.bias": normal(width),
        "t_embedder.mlp.0.weight": normal(width, 256),
        "t_embedder.mlp.0.bias": normal(width),
        "t_embedder.mlp.2.weight": normal(width, width),
        "t_embedder.mlp.2.bias": normal(width),
        "y_embedder.embedding_table.weight": normal(CLASSES + 1, width),
        "final_layer.linear.weight": normal(patch * patch * 2 * channels, width),
        "final_layer.linear.bias": normal(patch * patch * 2 * channels),
        "final_layer.adaLN_modulation.1.weight": normal(2 * width, width),
        "final_layer.adaLN_modulation.1.bias": normal(2 * width),
    }
    for i in range(depth):
        for name, outputs, inputs in [
            ("attn.qkv", 3 * width, width),
            ("attn.proj", width, width),
            ("mlp.fc1", 4 * width, width),
            ("mlp.fc2", width, 4 * width),
            ("adaLN_modulation.1", 6 * width, width),
        ]:
            state[f"blocks.{i}.{name}.weight"] = normal(outputs, inputs)
            state[f"blocks.{i}.{name}.bias"] = normal(outputs)
    return state


def official_pixart(*, width: int = 32, depth: int = 3, text: int = 24, length: int = 6) -> dict[str, Tensor]:
    """The key layout of a PixArt-alpha state dict."""
    state = official_dit(width=width, depth=depth)
    generator = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> Tensor:
        return 0.08 * torch.randn(*shape, generator=generator)

    for name in [k for k in state if "adaLN" in k or k.startswith("y_embedder")]:
        del state[name]
    state |= {
        "t_block.1.weight": normal(6 * width, width),
        "t_block.1.bias": normal(6 * width),
        "y_embedder.y_embedding": normal(length, text),
        "y_embedder.y_proj.fc1.weight": normal(width, text),
        "y_embedder.y_proj.fc1.bias": normal(width),
        "y_embedder.y_proj.fc2.weight": normal(width, width),
        "y_embedder.y_proj.fc2.bias": normal(width),
        "final_layer.scale_shift_table": normal(2, width),
    }
    for i in range(depth):
        state[f"blocks.{i}.scale_shift_table"] = normal(6, width)
        for name, outputs in [("q_linear", width), ("kv_linear", 2 * width), ("proj", width)]:
            state[f"blocks.{i}.cross_attn.{name}.weight"] = normal(outputs, width)
            state[f"blocks.{i}.cross_attn.{name}.bias"] = normal(outputs)
    return state


def official_positions(width: int, side: int) -> Tensor:
    """The table DiT stores, by its own recipe: numpy, float64, columns first. [1, N, D]"""
    import numpy as np

    columns, rows = np.meshgrid(np.arange(side, dtype=np.float32), np.arange(side, dtype=np.float32))
    omega = 1.0 / 10000 ** (np.arange(width // 4, dtype=np.float64) / (width / 4.0))
    parts = []
    for places in (columns, rows):
        angles = np.einsum("m,d->md", places.reshape(-1), omega)
        parts += [np.sin(angles), np.cos(angles)]
    return torch.from_numpy(np.concatenate(parts, axis=1)).float()[None]


def official_forward(state: dict[str, Tensor], x: Tensor, time: Tensor, labels: Tensor, heads: int) -> Tensor:
    """The official DiT's forward pass in plain tensor operations, written from the paper; for comparison only."""
    import math

    import torch.nn.functional as F

    def linear(name: str, value: Tensor) -> Tensor:
        return F.linear(value, state[f"{name}.weight"], state[f"{name}.bias"])

    def norm(value: Tensor) -> Tensor:
        centred = value - value.mean(-1, keepdim=True)
        return centred / (centred.square().mean(-1, keepdim=True) + 1e-6).sqrt()

    width, _, patch, _ = state["x_embedder.proj.weight"].shape
    frequencies = torch.exp(-math.log(10000) * torch.arange(128) / 128)
    waves = torch.cat([torch.cos(time[:, None] * frequencies), torch.sin(time[:, None] * frequencies)], 1)
    c = linear("t_embedder.mlp.2", F.silu(linear("t_embedder.mlp.0", waves.float())))
    c = c + state["y_embedder.embedding_table.weight"][labels]
    h = F.conv2d(x, state["x_embedder.proj.weight"], state["x_embedder.proj.bias"], stride=patch)
    h = h.flatten(2).transpose(1, 2) + state["pos_embed"]
    depth = len({name.split(".")[1] for name in state if name.startswith("blocks.")})
    for i in range(depth):
        six = linear(f"blocks.{i}.adaLN_modulation.1", F.silu(c))[:, None].chunk(6, dim=-1)
        qkv = linear(f"blocks.{i}.attn.qkv", norm(h) * (1 + six[1]) + six[0])
        batch, tokens, _ = qkv.shape
        q, k, v = qkv.reshape(batch, tokens, 3, heads, width // heads).permute(2, 0, 3, 1, 4)
        weights = (q @ k.transpose(-2, -1) / math.sqrt(width // heads)).softmax(-1)
        h = h + six[2] * linear(f"blocks.{i}.attn.proj", (weights @ v).transpose(1, 2).reshape(h.shape))
        hidden = F.gelu(linear(f"blocks.{i}.mlp.fc1", norm(h) * (1 + six[4]) + six[3]), approximate="tanh")
        h = h + six[5] * linear(f"blocks.{i}.mlp.fc2", hidden)
    shift, scale = linear("final_layer.adaLN_modulation.1", F.silu(c))[:, None].chunk(2, dim=-1)
    h = linear("final_layer.linear", norm(h) * (1 + scale) + shift)
    side = round(h.shape[1] ** 0.5)
    out = h.reshape(len(x), side, side, patch, patch, -1)
    return torch.einsum("nhwpqc->nchpwq", out).reshape(len(x), -1, side * patch, side * patch)


def network(config: DiTConfig, weights: dict[str, Tensor]) -> DiT:
    model = DiT(config)
    model.load_state_dict(weights, strict=True)
    return model.eval()
