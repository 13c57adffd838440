"""Foreign weight layouts, each a table that is read in both directions.

A table maps a layer or tensor of ours to foreign ones. `*` is the number of a block. Several foreign names are put one
under the other along the first axis (q, k and v are one matrix here), then reshaped (a patch convolution is a linear
map of the flattened patch). A `*` on their side alone means that every block holds a copy, and copies must be equal:
diffusers' DiT keeps a time and label embedder in every block. Splitting and reshaping back is exact, so import followed
by export gives the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ..artifacts import UserError
from ..diffusion import AnySchedule, Kind
from ..models.dit import DiT, DiTConfig
from .imported import Fate, ImportedNetwork

Layout = Literal["dit", "pixart", "diffusers-dit", "diffusers-pixart"]

OFFICIAL = {
    "patches.project": "x_embedder.proj",
    "conditioning.time.enter": "t_embedder.mlp.0",
    "conditioning.time.leave": "t_embedder.mlp.2",
    "blocks.*.attention.qkv": "blocks.*.attn.qkv",
    "blocks.*.attention.out": "blocks.*.attn.proj",
    "blocks.*.mlp.enter": "blocks.*.mlp.fc1",
    "blocks.*.mlp.leave": "blocks.*.mlp.fc2",
    "head.project": "final_layer.linear",
}
DIFFUSERS = {
    "patches.project": "pos_embed.proj",
    "blocks.*.attention.qkv": " ".join(f"transformer_blocks.*.attn1.to_{part}" for part in "qkv"),
    "blocks.*.attention.out": "transformer_blocks.*.attn1.to_out.0",
    "blocks.*.mlp.enter": "transformer_blocks.*.ff.net.0.proj",
    "blocks.*.mlp.leave": "transformer_blocks.*.ff.net.2",
}
LAYOUTS: dict[Layout, dict[str, str]] = {
    "dit": {  # facebookresearch/DiT and willisma/SiT
        **OFFICIAL,
        "conditioning.labels.weight": "y_embedder.embedding_table.weight",
        "blocks.*.modulation": "blocks.*.adaLN_modulation.1",
        "head.modulation": "final_layer.adaLN_modulation.1",
    },
    "pixart": {  # PixArt-alpha/PixArt-alpha
        **OFFICIAL,
        "conditioning.modulation": "t_block.1",
        "conditioning.text.enter": "y_embedder.y_proj.fc1",
        "conditioning.text.leave": "y_embedder.y_proj.fc2",
        "conditioning.null_text": "y_embedder.y_embedding",
        "blocks.*.table": "blocks.*.scale_shift_table",
        "blocks.*.cross.q": "blocks.*.cross_attn.q_linear",
        "blocks.*.cross.kv": "blocks.*.cross_attn.kv_linear",
        "blocks.*.cross.out": "blocks.*.cross_attn.proj",
        "head.table": "final_layer.scale_shift_table",
    },
    "diffusers-dit": {  # DiTTransformer2DModel
        **DIFFUSERS,
        "conditioning.time.enter": "transformer_blocks.*.norm1.emb.timestep_embedder.linear_1",
        "conditioning.time.leave": "transformer_blocks.*.norm1.emb.timestep_embedder.linear_2",
        "conditioning.labels.weight": "transformer_blocks.*.norm1.emb.class_embedder.embedding_table.weight",
        "blocks.*.modulation": "transformer_blocks.*.norm1.linear",
        "head.modulation": "proj_out_1",
        "head.project": "proj_out_2",
    },
    "diffusers-pixart": {  # PixArtTransformer2DModel, which has no place for a null caption: see export.py
        **DIFFUSERS,
        "conditioning.time.enter": "adaln_single.emb.timestep_embedder.linear_1",
        "conditioning.time.leave": "adaln_single.emb.timestep_embedder.linear_2",
        "conditioning.modulation": "adaln_single.linear",
        "conditioning.text.enter": "caption_projection.linear_1",
        "conditioning.text.leave": "caption_projection.linear_2",
        "blocks.*.table": "transformer_blocks.*.scale_shift_table",
        "blocks.*.cross.q": "transformer_blocks.*.attn2.to_q",
        "blocks.*.cross.kv": "transformer_blocks.*.attn2.to_k transformer_blocks.*.attn2.to_v",
        "blocks.*.cross.out": "transformer_blocks.*.attn2.to_out.0",
        "head.table": "scale_shift_table",
        "head.project": "proj_out",
    },
}


@dataclass(frozen=True)
class Pair:
    """One tensor of ours, the foreign tensors it is made of, and those that must be copies of the first of them."""

    ours: str
    theirs: tuple[str, ...]
    copies: tuple[str, ...]


def pairs(layout: Layout, config: DiTConfig) -> Iterator[Pair]:
    """The table of a layout for a network of this shape, tensor by tensor."""
    tensors = expected_shapes(config)
    for ours, theirs in LAYOUTS[layout].items():
        for i in range(config.depth if "*" in ours else 1):
            name = ours.replace("*", str(i))
            copies = range(1, config.depth) if "*" in theirs and "*" not in ours else ()
            for part in ("",) if name in tensors else (".weight", ".bias"):  # a layer is two tensors
                sources = [source + part for source in theirs.split()]
                yield Pair(
                    name + part,
                    tuple(source.replace("*", str(i)) for source in sources),
                    tuple(source.replace("*", str(k)) for source in sources for k in copies),
                )


def import_weights(
    layout: Layout, config: DiTConfig, schedule: AnySchedule, kind: Kind, foreign: Mapping[str, Tensor], where: str
) -> ImportedNetwork:
    """Foreign tensors under our names, as float32. Missing keys, wrong shapes and unequal copies are refused.

    Foreign tensors that the table does not name are reported as dropped.
    """
    shapes = expected_shapes(config)
    weights: dict[str, Tensor] = {}
    fates: dict[str, Fate] = {}
    for pair in pairs(layout, config):
        missing = [name for name in (*pair.theirs, *pair.copies) if name not in foreign]
        if missing:
            raise UserError(f"{where}: key {missing[0]} is missing; this is not a complete {layout} checkpoint")
        for copy in pair.copies:
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
        fates[pair.ours] = Fate("kept", (*pair.theirs, *pair.copies))
    used = {name for fate in fates.values() for name in fate.source}
    dropped = dict.fromkeys(sorted(foreign.keys() - used), "no place in our network")
    return ImportedNetwork(config, weights, schedule, kind, fates, dropped)


def export_weights(layout: Layout, config: DiTConfig, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Our weights under a foreign layout's names: the exact inverse of `import_weights`."""
    foreign: dict[str, Tensor] = {}
    for pair in pairs(layout, config):
        ours = weights[pair.ours]
        if pair.ours == "patches.project.weight":  # theirs is a convolution
            ours = ours.reshape(config.width, config.latent[0], config.patch, config.patch)
        for name, part in zip(pair.theirs, ours.chunk(len(pair.theirs)), strict=True):
            foreign[name] = part.contiguous().clone()
        for copy in pair.copies:
            foreign[copy] = foreign[pair.theirs[0]].clone()
    return foreign


def expected_shapes(config: DiTConfig) -> dict[str, torch.Size]:
    """Shape of every tensor of the network, by name; no weights are made."""
    with torch.device("meta"):
        return {name: value.shape for name, value in DiT(config).state_dict().items()}
