"""atoll describe: what an architecture costs, before anything is trained."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.table import Table

from ..artifacts import UserError
from ..models.accounting import Cost, account
from ..models.dit import DiTConfig
from ..models.presets import preset

MICRO_BATCHES = (1, 8, 32, 128)


def describe(
    architecture: Annotated[str, typer.Argument(help="Size and patch: s, b, l, xl or 3b, and 1, 2, 4 or 8: xl/2")],
    latent: Annotated[str, typer.Option(help="Latent shape, channels x height x width")] = "4x32x32",
    variant: Annotated[str, typer.Option(help="adaln (DiT) or adaln-single (PixArt-alpha)")] = "adaln-single",
    text: Annotated[int | None, typer.Option(help="Read text tokens of this width by cross-attention")] = None,
    text_length: Annotated[int, typer.Option(help="Text tokens per image, with --text")] = 77,
    pooled: Annotated[int | None, typer.Option(help="Read one text vector of this width")] = None,
    classes: Annotated[int | None, typer.Option(help="Read a class label, one of this many")] = None,
    words: Annotated[int | None, typer.Option(help="Read words of a vocabulary of this size")] = None,
    out_channels: Annotated[int | None, typer.Option(help="Channels predicted, if not those of the latent")] = None,
    micro_batch: Annotated[list[int] | None, typer.Option(help="Micro-batches to show memory for; repeat it")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables")] = False,
) -> None:
    """Print parameters, FLOPs per image and training memory of an architecture.

    Examples:

      atoll describe xl/2 --text 768 --latent 4x32x32

      atoll describe xl/2 --variant adaln --classes 1000 --out-channels 8

      atoll describe b/4 --words 500 --latent 3x64x64 --micro-batch 16 --micro-batch 64 --json
    """
    config = _config(architecture, latent, variant, text, text_length, pooled, classes, words, out_channels)
    cost = account(config)
    sizes = micro_batch or list(MICRO_BATCHES)
    if min(sizes) < 1:
        raise UserError(f"--micro-batch {min(sizes)}: must be at least 1")
    if as_json:
        typer.echo(json.dumps(_as_dict(config, cost, sizes), indent=2))
    else:
        _print(architecture, config, cost, sizes)


def _config(
    architecture: str,
    latent: str,
    variant: str,
    text: int | None,
    text_length: int,
    pooled: int | None,
    classes: int | None,
    words: int | None,
    out_channels: int | None,
) -> DiTConfig:
    given = {"--text": text, "--pooled": pooled, "--classes": classes, "--words": words}
    chosen = [name for name, value in given.items() if value is not None]
    if len(chosen) > 1:
        raise UserError(f"{' and '.join(chosen)}: a network reads one condition; give only one of them")
    condition: dict[str | None, Literal["none", "tokens", "pooled", "labels", "words"]] = {
        None: "none",
        "--text": "tokens",
        "--pooled": "pooled",
        "--classes": "labels",
        "--words": "words",
    }
    if variant not in ("adaln", "adaln-single"):
        raise UserError(f"--variant {variant}: use adaln or adaln-single")
    try:
        return preset(
            architecture,
            latent=parse_latent(latent),
            variant="adaln" if variant == "adaln" else "adaln-single",
            condition=condition[chosen[0] if chosen else None],
            classes=classes,
            vocabulary=words,
            text_width=text if text is not None else pooled,
            text_length=text_length if text is not None else None,
            out_channels=out_channels,
        )
    except ValueError as error:
        raise UserError(f"{architecture}: {error}") from error


def parse_latent(text: str) -> tuple[int, int, int]:
    """`4x32x32` -> (4, 32, 32)."""
    parts = text.lower().split("x")
    if len(parts) != 3 or not all(part.isdecimal() for part in parts):
        raise UserError(f"--latent {text}: write channels, height and width, such as 4x32x32")
    channels, height, width = map(int, parts)
    return channels, height, width


def _as_dict(config: DiTConfig, cost: Cost, micro_batches: list[int]) -> dict[str, object]:
    return {
        "architecture": asdict(config),
        "parameters": cost.parameters,
        "fixed_position_values": cost.fixed,
        "flops_per_image": {"forward": cost.flops_forward, "training": cost.flops_training},
        "bytes": {
            "weights": cost.weights_bytes,
            "gradients": cost.gradients_bytes,
            "optimizer": cost.optimizer_bytes,
            "average": cost.average_bytes,
        },
        "activation_bytes": [
            {
                "micro_batch": size,
                "kept": cost.activation_bytes(size),
                "checkpointed": cost.activation_bytes(size, recomputed_blocks=cost.depth),
            }
            for size in micro_batches
        ],
    }


def _print(architecture: str, config: DiTConfig, cost: Cost, micro_batches: list[int]) -> None:
    console = Console()
    table = Table(title=f"{architecture}, {config.variant}, condition {config.condition}", show_header=False)
    table.add_row("image tokens", f"{config.image_tokens:,}")
    table.add_row("parameters", f"{cost.parameters:,}  ({cost.parameters / 1e6:.1f} M)")
    table.add_row("FLOPs per image, forward", f"{cost.flops_forward / 1e9:,.1f} G")
    table.add_row("FLOPs per image, training", f"{cost.flops_training / 1e9:,.1f} G")
    for name in ("weights", "gradients", "optimizer", "average"):
        table.add_row(f"{name} (float32)", _gib(getattr(cost, f"{name}_bytes")))
    table.add_row("all that does not grow with the batch", _gib(cost.fixed_bytes))
    console.print(table)

    memory = Table(title="activations in bfloat16, eager (a compiled step keeps less)")
    for heading in ("micro-batch", "kept", "every block checkpointed", "total, kept", "total, checkpointed"):
        memory.add_column(heading, justify="right")
    for size in micro_batches:
        kept, saved = cost.activation_bytes(size), cost.activation_bytes(size, recomputed_blocks=cost.depth)
        totals = (_gib(cost.fixed_bytes + kept), _gib(cost.fixed_bytes + saved))
        memory.add_row(str(size), _gib(kept), _gib(saved), *totals)
    console.print(memory)


def _gib(count: int) -> str:
    return f"{count / 2**30:,.2f} GiB"
