"""atoll convert: a foreign checkpoint becomes an expert."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from ..artifacts import UserError
from ..convert import expert as stage
from ..convert.imported import ImportedNetwork
from ..convert.source import Source, read_source
from ..data.space import LatentConfig, TextConfig
from ..islands.order import read_order
from .describe import parse_latent
from .progress import console

FORMS = ("dit", "sit", "pixart", "diffusers")


def convert(
    source: Annotated[Path, typer.Argument(help="Checkpoint file (.pt, .pth, .safetensors) or diffusers folder")],
    form: Annotated[str, typer.Option("--from", help="dit, sit, pixart or diffusers")],
    out: Annotated[Path, typer.Option(help="Folder for the expert")],
    order: Annotated[str | None, typer.Option(help="Warm start for this order: its architecture and objective")] = None,
    objective: Annotated[
        str | None, typer.Option(help="Warm start for schedule:kind, such as linear-flow:velocity")
    ] = None,
    variant: Annotated[str | None, typer.Option(help="Warm start: adaln or adaln-single, if another one")] = None,
    text: Annotated[int | None, typer.Option(help="Warm start: read text tokens of this width from now on")] = None,
    text_length: Annotated[int | None, typer.Option(help="Text tokens per image, with --text (default 77)")] = None,
    classes: Annotated[int | None, typer.Option(help="Warm start: read this many class labels from now on")] = None,
    final: Annotated[
        str | None,
        typer.Option(help="Warm start, other objective: new final layer (default), or bridge: keep it"),
    ] = None,
    keep_labels: Annotated[
        bool, typer.Option("--keep-labels", help="Warm start: class labels mean the same in the new data")
    ] = False,
    seed: Annotated[int | None, typer.Option(help="Warm start: seed of what is re-initialized (default 0)")] = None,
    license: Annotated[str | None, typer.Option(help="License of the source, if it is not the official one")] = None,
    heads: Annotated[int | None, typer.Option(help="Attention heads, if the width is of no known size")] = None,
    latent: Annotated[str | None, typer.Option(help="Latent shape, if the file does not say it: 4x32x32")] = None,
    autoencoder: Annotated[str | None, typer.Option(help="Id of the autoencoder the latents come from")] = None,
    latent_scale: Annotated[float | None, typer.Option(help="Latents were multiplied by this: 0.18215")] = None,
    text_encoder: Annotated[str | None, typer.Option(help="Id of the text encoder the network reads")] = None,
    null_text: Annotated[Path | None, typer.Option(help="Embedding of the empty caption, for diffusers PixArt")] = None,
) -> None:
    """Turn a checkpoint into an expert: as it is, or as the warm start of another one.

    \b
    Examples:
      atoll convert DiT-XL-2-256x256.pt --from dit --out imagenet-expert
      atoll convert DiT-XL-2-256x256.pt --from dit --order runs/art/orders/03.json --out start-03
      atoll convert SiT-XL-2-256.pt --from sit --objective linear-flow:velocity --text 768 --out start
      atoll convert exported/ --from diffusers --out back
    """
    if form not in FORMS:
        raise UserError(f"--from {form}: use one of {', '.join(FORMS)}")
    if form == "diffusers":
        stage.refuse_unused({"--heads": heads, "--latent": latent}, "is for --from dit, sit or pixart")
    else:
        stage.refuse_unused({"--null-text": null_text}, "is for --from diffusers")
    if order is not None:
        brought: dict[str, object] = {
            "--objective": objective,
            "--variant": variant,
            "--text": text,
            "--classes": classes,
        }
        brought |= {"--autoencoder": autoencoder, "--latent-scale": latent_scale, "--text-encoder": text_encoder}
        stage.refuse_unused(brought, "comes from --order")
    if text is None:
        stage.refuse_unused({"--text-length": text_length}, "is for --text")
    shape = None if latent is None else parse_latent(latent)
    read = read_source(source, form, heads=heads, latent=shape, license=license, null_text=null_text)  # type: ignore[arg-type]
    target, spaces = _target(read, order, objective, variant, text, text_length, classes, final, keep_labels, seed)
    if spaces is None:
        config = read.network.config if target is None else target.architecture
        spaces = stage.own_spaces(
            read, config, autoencoder=autoencoder, latent_scale=latent_scale, text_encoder=text_encoder
        )
    done = stage.convert(read, out, latent=spaces[0], text=spaces[1], target=target)
    print_report(done.network)
    if read.non_commercial:
        console.print(f"[bold yellow]non-commercial:[/] the source is under {read.license}, and so is this expert")
    what = "warm start" if target is not None else "expert"
    console.print(f"{what} {done.artifact.digest[:12]} ({done.card.license}) in [bold]{out}[/bold]")


def _target(
    source: Source,
    order: str | None,
    objective: str | None,
    variant: str | None,
    text: int | None,
    text_length: int | None,
    classes: int | None,
    final: str | None,
    keep_labels: bool,
    seed: int | None,
) -> tuple[stage.Target | None, tuple[LatentConfig, TextConfig | None] | None]:
    """What the flags ask for; None for a conversion as it is. An order brings its own latent and text space."""
    changes: dict[str, Any] = {}
    if variant is not None:
        changes["variant"] = variant
    if text is not None and classes is not None:
        raise UserError("--text and --classes: a network reads one condition; give only one of them")
    if text is not None:
        changes |= {"condition": "tokens", "classes": None, "text_width": text, "text_length": text_length or 77}
    if classes is not None:
        changes |= {"condition": "labels", "classes": classes, "text_width": None, "text_length": None}
    if final not in (None, "new", "bridge"):
        raise UserError(f"--final {final}: use new or bridge")
    layer: stage.FinalLayer = "bridge" if final == "bridge" else "new"
    if order is not None:
        wanted, _ = read_order(order)
        architecture = wanted.architecture
        schedule, kind = wanted.objective.schedule, wanted.objective.kind
        spaces = (wanted.latent, wanted.text)
    elif objective is None and not changes:
        warm = {"--final": final, "--keep-labels": keep_labels, "--seed": seed}
        stage.refuse_unused(warm, "is for a warm start (--order, --objective, --variant, --text or --classes)")
        return None, None
    else:
        spaces = None
        schedule, kind = (
            (source.network.schedule, source.network.kind) if objective is None else stage.parse_objective(objective)
        )
        try:
            architecture = replace(source.network.config, **changes)
        except ValueError as error:
            raise UserError(f"warm start: {error}") from error
    target = stage.Target(
        architecture=architecture, schedule=schedule, kind=kind, final=layer, keep_labels=keep_labels, seed=seed or 0
    )
    return target, spaces


def print_report(network: ImportedNetwork) -> None:
    """Every key once; the same fate in every block on one line. The whole of it is in conversion.json."""
    for row in network.rows():
        key, source, how, note = map(escape, row)  # names come from an untrusted file
        line = f"[bold]{how:14s}[/] {key} <- {source}" if source != "-" else f"[bold]{how:14s}[/] {key}"
        console.print(f"{line}  [dim]{note}[/]", soft_wrap=True, highlight=False)
    counts = ", ".join(f"{count} {how}" for how, count in network.count().items())
    console.print(f"tensors: {counts}", highlight=False)
