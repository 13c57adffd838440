"""Foreign weight layouts, each one table that is read in both directions.

A `Pair` says which foreign tensors make one of ours: put one under the other along the first axis (q, k and v
are one matrix here), then reshaped (a patch convolution is a linear map of the flattened patch). Splitting and
reshaping back is exact, so import followed by export gives the same bits. `tied` names foreign tensors that
must be copies: diffusers' DiT keeps a time and label embedder in every block.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from ..artifacts import UserError
from ..models.dit import DiT, DiTConfig

Layout = Literal["dit", "pixart", "diffusers-dit", "diffusers-pixart"]


@dataclass(frozen=True)
class Pair:
    """One tensor of ours and the foreign tensors it is made of."""

    ours: str
    theirs: tuple[str, ...]
    tied: tuple[str, ...] = ()
    convolution: bool = False  # theirs has shape [width, channels, patch, patch]


@dataclass(frozen=True)
class Imported:
    """Foreign weights under our names."""

    weights: dict[str, Tensor]
    sources: dict[str, tuple[str, ...]]  # our name -> foreign names
    dropped: dict[str, str] = field(default_factory=dict)  # foreign name -> why


def pairs(layout: Layout, config: DiTConfig) -> list[Pair]:
    """The whole table of one layout for a network of this shape."""
    tables = {
        "dit": _official_dit,
        "pixart": _official_pixart,
        "diffusers-dit": _diffusers_dit,
        "diffusers-pixart": _diffusers_pixart,
    }
    return list(tables[layout](config))


def _layer(ours: str, *theirs: str, tied: tuple[str, ...] = (), convolution: bool = False) -> Iterator[Pair]:
    """The two tensors of a linear layer, or of a convolution that is one."""
    for part in ("weight", "bias"):
        names, copies = (tuple(f"{name}.{part}" for name in group) for group in (theirs, tied))
        yield Pair(f"{ours}.{part}", names, copies, convolution and part == "weight")


def _official_dit(config: DiTConfig) -> Iterator[Pair]:
    """facebookresearch/DiT and willisma/SiT: the same modules, the same names."""
    yield from _layer("patches.project", "x_embedder.proj", convolution=True)
    yield from _layer("conditioning.time.enter", "t_embedder.mlp.0")
    yield from _layer("conditioning.time.leave", "t_embedder.mlp.2")
    yield Pair("conditioning.labels.weight", ("y_embedder.embedding_table.weight",))
    for i in range(config.depth):
        yield from _layer(f"blocks.{i}.attention.qkv", f"blocks.{i}.attn.qkv")
        yield from _layer(f"blocks.{i}.attention.out", f"blocks.{i}.attn.proj")
        yield from _layer(f"blocks.{i}.mlp.enter", f"blocks.{i}.mlp.fc1")
        yield from _layer(f"blocks.{i}.mlp.leave", f"blocks.{i}.mlp.fc2")
        yield from _layer(f"blocks.{i}.modulation", f"blocks.{i}.adaLN_modulation.1")
    yield from _layer("head.modulation", "final_layer.adaLN_modulation.1")
    yield from _layer("head.project", "final_layer.linear")


def _official_pixart(config: DiTConfig) -> Iterator[Pair]:
    """PixArt-alpha/PixArt-alpha."""
    yield from _layer("patches.project", "x_embedder.proj", convolution=True)
    yield from _layer("conditioning.time.enter", "t_embedder.mlp.0")
    yield from _layer("conditioning.time.leave", "t_embedder.mlp.2")
    yield from _layer("conditioning.modulation", "t_block.1")
    yield from _layer("conditioning.text.enter", "y_embedder.y_proj.fc1")
    yield from _layer("conditioning.text.leave", "y_embedder.y_proj.fc2")
    yield Pair("conditioning.null_text", ("y_embedder.y_embedding",))
    for i in range(config.depth):
        yield Pair(f"blocks.{i}.table", (f"blocks.{i}.scale_shift_table",))
        yield from _layer(f"blocks.{i}.attention.qkv", f"blocks.{i}.attn.qkv")
        yield from _layer(f"blocks.{i}.attention.out", f"blocks.{i}.attn.proj")
        yield from _layer(f"blocks.{i}.cross.q", f"blocks.{i}.cross_attn.q_linear")
        yield from _layer(f"blocks.{i}.cross.kv", f"blocks.{i}.cross_attn.kv_linear")
        yield from _layer(f"blocks.{i}.cross.out", f"blocks.{i}.cross_attn.proj")
        yield from _layer(f"blocks.{i}.mlp.enter", f"blocks.{i}.mlp.fc1")
        yield from _layer(f"blocks.{i}.mlp.leave", f"blocks.{i}.mlp.fc2")
    yield Pair("head.table", ("final_layer.scale_shift_table",))
    yield from _layer("head.project", "final_layer.linear")


def _diffusers_dit(config: DiTConfig) -> Iterator[Pair]:
    """diffusers' DiTTransformer2DModel: every block has its own copy of the time and label embedders."""

    def copies(name: str) -> tuple[str, ...]:
        return tuple(f"transformer_blocks.{i}.norm1.emb.{name}" for i in range(config.depth))

    time_enter, time_leave = copies("timestep_embedder.linear_1"), copies("timestep_embedder.linear_2")
    labels = copies("class_embedder.embedding_table.weight")
    yield from _layer("patches.project", "pos_embed.proj", convolution=True)
    yield from _layer("conditioning.time.enter", time_enter[0], tied=time_enter[1:])
    yield from _layer("conditioning.time.leave", time_leave[0], tied=time_leave[1:])
    yield Pair("conditioning.labels.weight", labels[:1], tied=labels[1:])
    for i in range(config.depth):
        yield from _diffusers_block(i)
        yield from _layer(f"blocks.{i}.modulation", f"transformer_blocks.{i}.norm1.linear")
    yield from _layer("head.modulation", "proj_out_1")
    yield from _layer("head.project", "proj_out_2")


def _diffusers_pixart(config: DiTConfig) -> Iterator[Pair]:
    """diffusers' PixArtTransformer2DModel. It has no place for a null caption: see `export`."""
    yield from _layer("patches.project", "pos_embed.proj", convolution=True)
    yield from _layer("conditioning.time.enter", "adaln_single.emb.timestep_embedder.linear_1")
    yield from _layer("conditioning.time.leave", "adaln_single.emb.timestep_embedder.linear_2")
    yield from _layer("conditioning.modulation", "adaln_single.linear")
    yield from _layer("conditioning.text.enter", "caption_projection.linear_1")
    yield from _layer("conditioning.text.leave", "caption_projection.linear_2")
    for i in range(config.depth):
        block = f"transformer_blocks.{i}"
        yield Pair(f"blocks.{i}.table", (f"{block}.scale_shift_table",))
        yield from _diffusers_block(i)
        yield from _layer(f"blocks.{i}.cross.q", f"{block}.attn2.to_q")
        yield from _layer(f"blocks.{i}.cross.kv", f"{block}.attn2.to_k", f"{block}.attn2.to_v")
        yield from _layer(f"blocks.{i}.cross.out", f"{block}.attn2.to_out.0")
    yield Pair("head.table", ("scale_shift_table",))
    yield from _layer("head.project", "proj_out")


def _diffusers_block(i: int) -> Iterator[Pair]:
    block = f"transformer_blocks.{i}"
    yield from _layer(f"blocks.{i}.attention.qkv", *(f"{block}.attn1.to_{part}" for part in "qkv"))
    yield from _layer(f"blocks.{i}.attention.out", f"{block}.attn1.to_out.0")
    yield from _layer(f"blocks.{i}.mlp.enter", f"{block}.ff.net.0.proj")
    yield from _layer(f"blocks.{i}.mlp.leave", f"{block}.ff.net.2")


def import_weights(layout: Layout, config: DiTConfig, foreign: Mapping[str, Tensor], where: str) -> Imported:
    """Foreign tensors under our names, as float32. Refuses missing keys, wrong shapes and untied embedders.

    Foreign tensors that the table does not name are reported as dropped, never ignored.
    """
    shapes = expected_shapes(config)
    weights: dict[str, Tensor] = {}
    sources: dict[str, tuple[str, ...]] = {}
    table = pairs(layout, config)
    for pair in table:
        missing = [name for name in (*pair.theirs, *pair.tied) if name not in foreign]
        if missing:
            raise UserError(f"{where}: key {missing[0]} is missing; this is not a complete {layout} checkpoint")
        for copy in pair.tied:
            if not torch.equal(foreign[copy], foreign[pair.theirs[0]]):
                raise UserError(
                    f"{where}: {copy} differs from {pair.theirs[0]}; only checkpoints whose blocks share one time "
                    "and label embedder can be converted"
                )
        joined = torch.cat([foreign[name].to(torch.float32) for name in pair.theirs])
        wanted = shapes[pair.ours]
        if joined.numel() != wanted.numel() or (joined.shape[0] != wanted[0] and pair.ours.endswith("weight")):
            raise UserError(
                f"{where}: {' + '.join(pair.theirs)} has shape {list(joined.shape)}, expected {list(wanted)}; "
                "check --latent, --heads and --from"
            )
        weights[pair.ours] = joined.reshape(wanted).contiguous()
        sources[pair.ours] = (*pair.theirs, *pair.tied)
    used = {name for names in sources.values() for name in names}
    dropped = dict.fromkeys(sorted(foreign.keys() - used), "no place in our network")
    return Imported(weights, sources, dropped)


def export_weights(layout: Layout, config: DiTConfig, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Our weights under a foreign layout's names: the exact inverse of `import_weights`."""
    foreign: dict[str, Tensor] = {}
    for pair in pairs(layout, config):
        ours = weights[pair.ours]
        if pair.convolution:
            ours = ours.reshape(config.width, config.latent[0], config.patch, config.patch)
        for name, part in zip(pair.theirs, ours.chunk(len(pair.theirs)), strict=True):
            foreign[name] = part.contiguous().clone()
        for copy in pair.tied:
            foreign[copy] = foreign[pair.theirs[0]].clone()
    return foreign


def expected_shapes(config: DiTConfig) -> dict[str, torch.Size]:
    with torch.device("meta"):
        return {name: value.shape for name, value in DiT(config).state_dict().items()}
