"""atoll describe: what an architecture costs, before anything is trained."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import Annotated, Any

import typer
from rich.table import Table

from ..artifacts import UserError
from ..models.accounting import FLOAT32, Cost, account
from ..models.dit import DiTConfig
from ..models.presets import preset
from ..training.forecast import Forecast, forecast
from ..training.machines import GPUS, Machine, machine_named
from ..training.memory import USABLE, Fit
from ..training.resources import parse_memory
from .options import Settings, with_settings
from .progress import console

SHOWN = {"precision", "micro_batch", "recomputed_blocks", "compiling", "moments"}  # of an execution


@with_settings(DiTConfig)
def describe(
    architecture: Annotated[str, typer.Argument(help="Size and patch: s, b, l, xl or 3b, and 1, 2, 4 or 8: xl/2.")],
    *,
    latent: Annotated[str, typer.Option(help="Latent shape: channels x height x width.")] = "4x32x32",
    text: Annotated[int | None, typer.Option(help="Read 77 text tokens of this width by cross-attention.")] = None,
    classes: Annotated[int | None, typer.Option(help="Read a label of this many classes.")] = None,
    words: Annotated[int | None, typer.Option(help="Read words of a vocabulary of this size.")] = None,
    settings: Settings,
    batch: Annotated[int, typer.Option(help="Images per optimizer step.", min=1)] = 128,
    gpu: Annotated[str | None, typer.Option(help="One GPU in detail, such as 'RTX 4090' (default: all known).")] = None,
    memory: Annotated[str | None, typer.Option(help="GPU memory to stay within: 24GB (default: all of it).")] = None,
    eight_bit: Annotated[bool, typer.Option(help="Allow Adam's moments in 8 bits (extra torchao).")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Print parameters, FLOPs per image, memory and training speed on known GPUs. Nothing is allocated.

    Predictions are those that `atoll train` chooses its memory settings by.

    \b
    Examples:
      atoll describe xl/2 --text 768 --latent 4x32x32
      atoll describe xl/2 --classes 1000 --set variant=adaln --set out_channels=8
      atoll describe xl/2 --text 768 --gpu "RTX 4090" --batch 256
      atoll describe b/4 --words 500 --latent 3x64x64 --memory 8GB --json
    """
    config = settings.over(architecture_of(architecture, parse_latent(latent), text, classes, words))
    settings.show(config, architecture)
    cost = account(config)
    machines = machines_within(gpu, None if memory is None else parse_memory(memory))
    forecasts = [forecast(cost, name, machine, batch, eight_bit=eight_bit) for name, machine in machines.items()]
    if as_json:
        typer.echo(json.dumps(record(config, cost, batch, forecasts), indent=2))
        return
    title, machine = f"Training at batch {batch}", forecasts[0].machine
    if gpu is not None:
        title += f" on {gpu} ({machine.tflops:g} TFLOP/s, {machine.bandwidth:,g} GB/s)"
    tables = {
        f"{architecture}, {config.variant}, condition {config.condition}": cost_table(config, cost),
        f"\n{title}, as predicted": gpu_table(forecasts) if gpu is None else alternatives_table(forecasts[0]),
    }
    for title, table in tables.items():  # rich breaks a title of a table to its width
        console.print(title, style="bold", highlight=False)
        console.print(table)
    for note in notes(forecasts):
        console.print(note, style="dim", highlight=False, markup=False)


def architecture_of(
    name: str, latent: tuple[int, int, int], text: int | None, classes: int | None, words: int | None
) -> DiTConfig:
    if len(given := [f"--{n}" for n, v in {"text": text, "classes": classes, "words": words}.items() if v]) > 1:
        raise UserError(f"{' and '.join(given)}: a network reads one condition; give only one of them")
    try:
        if text is not None:
            return preset(name, latent=latent, condition="tokens", text_width=text, text_length=77)
        if words is not None:
            return preset(name, latent=latent, condition="words", vocabulary=words)
        return preset(name, latent=latent, condition="none" if classes is None else "labels", classes=classes)
    except ValueError as error:
        raise UserError(f"{name}: {error}") from error


def machines_within(gpu: str | None, memory: float | None) -> dict[str, Machine]:
    """Known GPUs by name, kept within `memory` GiB; without a name, all that have as much."""
    try:
        named = GPUS if gpu is None else {gpu: machine_named(gpu)}
    except ValueError as error:
        raise UserError(f"--gpu: {error}") from error
    if memory is None:
        return dict(named)
    found = {n: replace(m, memory=memory) for n, m in named.items() if gpu is not None or m.memory >= memory}
    if not found:
        raise UserError(f"--memory {memory:g}GB: no known GPU has so much; name one like it with --gpu")
    return found


def parse_latent(text: str) -> tuple[int, int, int]:
    """`4x32x32` -> (4, 32, 32)."""
    parts = text.lower().split("x")
    if len(parts) != 3 or not all(part.isdecimal() for part in parts):
        raise UserError(f"--latent {text}: write channels, height and width, such as 4x32x32")
    channels, height, width = map(int, parts)
    return channels, height, width


def record(config: DiTConfig, cost: Cost, batch: int, forecasts: list[Forecast]) -> dict[str, object]:
    def fit(one: Fit | None) -> dict[str, Any] | None:
        if one is None:
            return None
        return {
            **one.execution.model_dump(include=SHOWN),
            "memory_gib": one.memory_gib,
            "images_per_s": one.images_per_s,
        }

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
                **{name: fit(getattr(found, name)) for name in ("unlimited", "least", "chosen")},
                "alternatives": [{"change": other.change, **(fit(other.fit) or {})} for other in found.alternatives],
            }
            for found in forecasts
        ],
    }


def cost_table(config: DiTConfig, cost: Cost) -> Table:
    table = Table(show_header=False, box=None)
    table.add_row("image tokens", f"{config.image_tokens:,}")
    table.add_row("parameters", f"{cost.parameters:,}  ({cost.parameters / 1e6:.1f} M)")
    table.add_row("weights, float32", f"{FLOAT32 * cost.parameters / 2**30:,.2f} GiB")
    table.add_row("FLOPs per image, forward", f"{cost.flops_forward / 1e9:,.1f} G")
    table.add_row("FLOPs per image, training", f"{cost.flops_training / 1e9:,.1f} G")
    return table


def gpu_table(forecasts: list[Forecast]) -> Table:
    """What would be chosen on each GPU."""
    table = Table("GPU", header_style="bold", box=None)
    settings = ("micro-\nbatch", "blocks re-\ncomputed", "moments")
    for heading in ("GiB", "takes", *settings, "images\nper s", "speed\nkept"):
        table.add_column(heading, justify="right")
    for found in forecasts:
        row = [found.gpu, f"{found.machine.memory:g}"]
        if (fit := found.chosen) is None:
            table.add_row(*row, f"[red]> {found.least.memory_gib:.1f}[/red]")
            continue
        how = fit.execution
        row += [f"{fit.memory_gib:.1f}", str(how.micro_batch), str(how.recomputed_blocks), how.moments]
        table.add_row(*row, rate(fit), f"{found.speed_kept:.0%}")
    return table


def alternatives_table(found: Forecast) -> Table:
    """What would be chosen on one GPU, and what other settings would cost."""
    memory = found.machine.memory
    table = Table(f"within {memory:g} GiB", header_style="bold", box=None)
    for heading in ("takes", "fits", "images per s", "speed kept"):
        table.add_column(heading, justify="right")
    rows = [("chosen", found.chosen)] if found.chosen is not None else []
    rows += [(f"  --set {other.change}", other.fit) for other in found.alternatives]
    rows += [("with unlimited memory", found.unlimited), ("with the least memory", found.least)]
    for name, fit in rows:
        fits = "yes" if fit.memory_gib <= USABLE * memory else "[red]no[/red]"
        kept = f"{fit.images_per_s / found.unlimited.images_per_s:.0%}"
        table.add_row(name, f"{fit.memory_gib:.1f}", fits, rate(fit), kept, style="bold" if name == "chosen" else None)
    return table


def notes(forecasts: list[Forecast]) -> list[str]:
    """What the short words of the tables leave out."""
    lines = []
    if len(forecasts) == 1:
        named = {"chosen": forecasts[0].chosen, "with the least memory": forecasts[0].least}
        lines += [f"{name}: {fit.execution.in_words}" for name, fit in named.items() if fit is not None]
    elif any(found.chosen is None for found in forecasts):
        lines.append(">: nothing fits; this is the least it would take")
    if any(fit.execution.moments == "8-bit" for found in forecasts for fit in (found.chosen, found.least) if fit):
        lines.append("8-bit moments: pip install 'atoll-diffusion[torchao]'; without: --no-eight-bit")
    if narrow := [found.gpu for found in forecasts if not found.machine.bfloat16]:
        lines.append(f"without bfloat16, so in float32: {', '.join(narrow)}")
    return [*lines, f"takes: GiB, at most {USABLE:.0%} of the GPU; speed kept: of that with unlimited memory"]


def rate(fit: Fit) -> str:
    return f"{fit.images_per_s:,.0f}" if fit.images_per_s >= 10 else f"{fit.images_per_s:.1f}"
