"""atoll convert: a foreign checkpoint becomes an expert."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from ..convert import expert as stage
from ..convert.source import read_source
from ..islands.order import read_order
from ..models.dit import DiTConfig
from .describe import parse_latent
from .options import Settings, with_settings
from .tables import print_line

WARM_START = "is for a warm start (--order, --objective or --set)"


@with_settings(DiTConfig)
def convert(
    source: Annotated[Path, typer.Argument(help="Checkpoint file (.pt, .pth, .safetensors) or diffusers folder.")],
    *,
    form: Annotated[Literal["dit", "sit", "pixart", "diffusers"], typer.Option("--from", help="What SOURCE is.")],
    out: Annotated[Path, typer.Option(help="Folder for the expert.")],
    order: Annotated[str | None, typer.Option(help="Warm start for this order: its network and objective.")] = None,
    objective: Annotated[str | None, typer.Option(help="Warm start for schedule:kind: linear-flow:velocity.")] = None,
    settings: Settings,
    final: Annotated[Literal["new", "bridge"] | None, typer.Option(help="Warm start: final layer. (new)")] = None,
    keep_labels: Annotated[bool, typer.Option("--keep-labels", help="Warm start: labels mean the same.")] = False,
    seed: Annotated[int | None, typer.Option(help="Warm start: seed of what is re-initialized. (0)")] = None,
    license: Annotated[str | None, typer.Option(help="License of the source, if it is not the official one.")] = None,
    heads: Annotated[int | None, typer.Option(help="Attention heads, if the width is of no known size.")] = None,
    latent: Annotated[str | None, typer.Option(help="Latent shape, if the file has none: 4x32x32.")] = None,
    autoencoder: Annotated[str | None, typer.Option(help="Id of the autoencoder the latents come from.")] = None,
    latent_scale: Annotated[float | None, typer.Option(help="Latents were multiplied by this: 0.18215.")] = None,
    text_encoder: Annotated[str | None, typer.Option(help="Id of the text encoder the network reads.")] = None,
    null_text: Annotated[Path | None, typer.Option(help="Embedding of the empty caption, for a PixArt.")] = None,
) -> None:
    """Turn a checkpoint into an expert: as it is, or as the warm start of another one.

    For a warm start --set changes the network: variant=adaln-single, or what it reads.

    \b
    Examples:
      atoll convert DiT-XL-2-256x256.pt --from dit --out imagenet-expert
      atoll convert DiT-XL-2-256x256.pt --from dit --order runs/art/orders/03.json --out start-03
      atoll convert SiT-XL-2-256.pt --from sit --objective linear-flow:velocity --set variant=adaln-single --out start
      atoll convert exported/ --from diffusers --out back
    """
    if form == "diffusers":
        stage.refuse_unused({"--heads": heads, "--latent": latent}, "is for --from dit, sit or pixart")
    else:
        stage.refuse_unused({"--null-text": null_text}, "is for --from diffusers")
    shape = None if latent is None else parse_latent(latent)
    read = read_source(source, form, heads=heads, latent=shape, license=license, null_text=null_text)
    network = settings.over(read.network.config)
    settings.show(network, "the network")
    schedule, kind = read.network.schedule, read.network.kind
    if objective is not None:
        schedule, kind = stage.parse_objective(objective)
    if order is not None:
        given = {"--autoencoder": autoencoder, "--latent-scale": latent_scale, "--text-encoder": text_encoder}
        changed = " ".join(settings.words) or None
        stage.refuse_unused({"--objective": objective, **given, "--set": changed}, "comes from --order")
        wanted, _ = read_order(order)
        network, schedule, kind = wanted.architecture, wanted.objective.schedule, wanted.objective.kind
        spaces = wanted.latent, wanted.text
    else:
        spaces = stage.own_spaces(
            read, network, autoencoder=autoencoder, latent_scale=latent_scale, text_encoder=text_encoder
        )
    target = None
    if order or objective or settings.changes:
        target = stage.Target(
            architecture=network,
            schedule=schedule,
            kind=kind,
            final=final or "new",
            keep_labels=keep_labels,
            seed=seed or 0,
        )
    else:
        stage.refuse_unused({"--final": final, "--keep-labels": keep_labels, "--seed": seed}, WARM_START)
    done = stage.convert(read, out, latent=spaces[0], text=spaces[1], target=target)
    for key, origin, how, note in done.network.rows():  # the whole of it is in conversion.json
        print_line(f"{how:14s} {key}{'' if origin == '-' else f' <- {origin}'}  {note}")
    print_line(f"tensors: {', '.join(f'{count} {how}' for how, count in done.network.count().items())}")
    if read.non_commercial:
        print_line(f"non-commercial: the source is under {read.license}, and so is this expert")
    what = "expert" if target is None else "warm start"
    print_line(f"{what} {done.artifact.digest[:12]} ({done.card.license}) in {out}")
