"""atoll describe: what an architecture costs, before anything is trained."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.table import Table

from ..artifacts import UserError
from ..models.accounting import FLOAT32, Cost, account
from ..models.dit import DiTConfig
from ..models.presets import preset
from ..training.forecast import Forecast, forecast
from ..training.machines import GPUS, Machine, machine_named
from ..training.memory import USABLE, Fit
from ..training.resources import parse_memory

SHOWN = {"precision", "micro_batch", "recomputed_blocks", "compiling", "moments"}  # of an execution


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
    batch: Annotated[int, typer.Option(help="Images per optimizer step", min=1)] = 128,
    gpu: Annotated[str | None, typer.Option(help="One card in detail, such as 'RTX 4090' [default: all known]")] = None,
    memory: Annotated[
        str | None, typer.Option(help="Stay within this much of a card's memory, such as 24GB [default: all it has]")
    ] = None,
    eight_bit: Annotated[
        bool, typer.Option(help="Adam's moments may be stored in 8 bits (needs the extra torchao)")
    ] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables")] = False,
) -> None:
    """Print what an architecture costs: parameters, FLOPs per image, memory and speed of training on known GPUs.

    Memory and speed are predicted by what `atoll train` chooses with; nothing is allocated.

    Examples:

      atoll describe xl/2 --text 768 --latent 4x32x32

      atoll describe xl/2 --variant adaln --classes 1000 --out-channels 8

      atoll describe xl/2 --text 768 --gpu "RTX 4090" --batch 256

      atoll describe b/4 --words 500 --latent 3x64x64 --memory 8GB --json
    """
    config = _config(architecture, latent, variant, text, text_length, pooled, classes, words, out_channels)
    cost = account(config)
    forecasts = [
        forecast(cost, name, machine, batch, eight_bit=eight_bit) for name, machine in _machines(gpu, memory).items()
    ]
    if as_json:
        typer.echo(json.dumps(_as_dict(config, cost, batch, forecasts), indent=2))
        return
    console = Console()
    _print(console, f"{architecture}, {config.variant}, condition {config.condition}", _costs(config, cost))
    if gpu is None:
        _print(console, f"\nTraining at batch {batch}, as predicted", _on_all(forecasts))
    else:
        (found,) = forecasts
        _print(console, f"\nTraining at batch {batch} on {_in_words(found)}, as predicted", _on_one(found))
    for note in _notes(forecasts):
        console.print(note, style="dim", highlight=False, markup=False)


def _machines(gpu: str | None, memory: str | None) -> dict[str, Machine]:
    """Known cards by name, kept within `memory`; without a card named, all that have as much."""
    limit = None if memory is None else parse_memory(memory)
    if gpu is not None:
        try:
            named = machine_named(gpu)
        except ValueError as error:
            raise UserError(f"--gpu: {error}") from error
        return {gpu: named if limit is None else replace(named, memory=limit)}
    if limit is None:
        return dict(GPUS)
    found = {name: replace(machine, memory=limit) for name, machine in GPUS.items() if machine.memory >= limit}
    if not found:
        raise UserError(f"--memory {memory}: no known card has so much; say which is like it with --gpu")
    return found


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


def _as_dict(config: DiTConfig, cost: Cost, batch: int, forecasts: list[Forecast]) -> dict[str, object]:
    return {
        "architecture": asdict(config),
        "parameters": cost.parameters,
        "fixed_position_values": cost.fixed,
        "flops_per_image": {"forward": cost.flops_forward, "training": cost.flops_training},
        "batch": batch,
        "training": [
            {
                "gpu": found.gpu,
                **asdict(found.machine),
                "unlimited": _fit_as_dict(found.unlimited),
                "least": _fit_as_dict(found.least),
                "chosen": None if found.chosen is None else _fit_as_dict(found.chosen),
                "alternatives": [{"change": other.change, **_fit_as_dict(other.fit)} for other in found.alternatives],
            }
            for found in forecasts
        ],
    }


def _fit_as_dict(fit: Fit) -> dict[str, Any]:
    return {
        **fit.execution.model_dump(include=SHOWN),
        "memory_gib": fit.memory_gib,
        "images_per_s": fit.images_per_s,
    }


def _print(console: Console, title: str, table: Table) -> None:
    """A title is no wider than its table if rich prints it, and breaks where the terminal has room."""
    console.print(title, style="bold", highlight=False)
    console.print(table)


def _in_words(found: Forecast) -> str:
    return f"{found.gpu} ({found.machine.tflops:g} TFLOP/s, {found.machine.bandwidth:,g} GB/s)"


def _costs(config: DiTConfig, cost: Cost) -> Table:
    table = Table(show_header=False, box=None)
    table.add_row("image tokens", f"{config.image_tokens:,}")
    table.add_row("parameters", f"{cost.parameters:,}  ({cost.parameters / 1e6:.1f} M)")
    table.add_row("weights, float32", f"{FLOAT32 * cost.parameters / 2**30:,.2f} GiB")
    table.add_row("FLOPs per image, forward", f"{cost.flops_forward / 1e9:,.1f} G")
    table.add_row("FLOPs per image, training", f"{cost.flops_training / 1e9:,.1f} G")
    return table


def _on_all(forecasts: list[Forecast]) -> Table:
    """What would be chosen on each card."""
    table = Table(header_style="bold", box=None)
    table.add_column("card")
    settings = ("micro-\nbatch", "blocks re-\ncomputed", "moments")
    for heading in ("GiB", "takes", *settings, "images\nper s", "speed\nkept"):
        table.add_column(heading, justify="right")
    for found in forecasts:
        row = [found.gpu, f"{found.machine.memory:g}"]
        if found.chosen is None:
            table.add_row(*row, f"[red]> {found.least.memory_gib:.1f}[/red]")
        else:
            table.add_row(*row, *_row(found.chosen), f"{found.speed_kept:.0%}")
    return table


def _row(fit: Fit) -> list[str]:
    how = fit.execution
    settings = [str(how.micro_batch), str(how.recomputed_blocks), how.moments]
    return [f"{fit.memory_gib:.1f}", *settings, _rate(fit)]


def _on_one(found: Forecast) -> Table:
    """What would be chosen on one card, and what other settings would cost."""
    memory = found.machine.memory
    table = Table(header_style="bold", box=None)
    table.add_column(f"within {memory:g} GiB")
    for heading in ("takes", "fits", "images per s", "speed kept"):
        table.add_column(heading, justify="right")
    rows = [("chosen", found.chosen)] if found.chosen is not None else []
    rows += [(f"  --set {other.change}", other.fit) for other in found.alternatives]
    rows += [("with unlimited memory", found.unlimited), ("with the least memory", found.least)]
    for name, fit in rows:
        speed = fit.images_per_s / found.unlimited.images_per_s
        style = "bold" if fit is found.chosen else None
        fits_in = "yes" if fit.memory_gib <= USABLE * memory else "[red]no[/red]"
        table.add_row(name, f"{fit.memory_gib:.1f}", fits_in, _rate(fit), f"{speed:.0%}", style=style)
    return table


def _notes(forecasts: list[Forecast]) -> list[str]:
    """What the tables' short words leave out."""
    notes = []
    if len(forecasts) == 1:
        (found,) = forecasts
        named = {"chosen": found.chosen, "with the least memory": found.least}
        notes += [f"{name}: {fit.execution.in_words}" for name, fit in named.items() if fit is not None]
    elif any(found.chosen is None for found in forecasts):
        notes.append(">: nothing fits; this is the least it would take")
    if any(fit.execution.moments == "8-bit" for found in forecasts for fit in (found.chosen, found.least) if fit):
        notes.append("8-bit moments: pip install 'atoll-diffusion[torchao]'; without: --no-eight-bit")
    if narrow_less := [found.gpu for found in forecasts if not found.machine.bfloat16]:
        notes.append(f"without bfloat16, so in float32: {', '.join(narrow_less)}")
    notes.append(f"takes: GiB, at most {USABLE:.0%} of the card; speed kept: of that with unlimited memory")
    return notes


def _rate(fit: Fit) -> str:
    return f"{fit.images_per_s:,.0f}" if fit.images_per_s >= 10 else f"{fit.images_per_s:.1f}"
