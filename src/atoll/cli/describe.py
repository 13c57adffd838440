"""atoll describe: what an architecture costs, before anything is trained."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from typing import Annotated, Any

import typer
from pydantic import TypeAdapter

from ..artifacts import UserError
from ..models.accounting import FLOAT32, Cost, account
from ..models.dit import DiTConfig
from ..models.presets import preset
from ..training.memory import GPUS, USABLE, Fit, Machine, fits, machine_named
from .options import Memory, Settings, gib, with_settings
from .tables import print_line, print_table


@dataclass(frozen=True)
class Forecast:
    """One network on one GPU, as predicted."""

    gpu: str
    machine: Machine
    unlimited: Fit  # what would be chosen with any amount of memory
    least: Fit  # what needs least memory, however slow
    chosen: Fit | None  # None: nothing fits

    @staticmethod
    def of(cost: Cost, gpu: str, machine: Machine, batch: int, eight_bit: bool) -> Forecast:
        anything = fits(cost, replace(machine, memory=math.inf), batch, eight_bit=eight_bit)
        chosen = next(iter(fits(cost, machine, batch, eight_bit=eight_bit)), None)
        return Forecast(gpu, machine, anything[0], min(anything, key=lambda fit: fit.memory_gib), chosen)


@with_settings(DiTConfig)
def describe(
    architecture: Annotated[str, typer.Argument(help="Size and patch: s, b, l, xl or 3b, and 1, 2, 4 or 8: xl/2.")],
    *,
    latent: Annotated[str, typer.Option(help="Latent shape: channels x height x width.")] = "4x32x32",
    text: Annotated[int | None, typer.Option(help="Read 77 text tokens of this width by cross-attention.")] = None,
    settings: Settings,
    batch: Annotated[int, typer.Option(help="Images per optimizer step.", min=1)] = 128,
    gpu: Annotated[str | None, typer.Option(help="A GPU, such as 'RTX 4090' (default: all known).")] = None,
    memory: Memory = None,
    eight_bit: Annotated[bool, typer.Option(help="Allow Adam's moments in 8 bits (extra torchao).")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Print parameters, FLOPs per image, memory and training speed on known GPUs. Nothing is allocated.

    Predictions are those that `atoll train` chooses its memory settings by.

    \b
    Examples:
      atoll describe xl/2 --text 768 --latent 4x32x32
      atoll describe xl/2 --set condition=labels --set classes=1000 --set variant=adaln
      atoll describe xl/2 --text 768 --gpu "RTX 4090" --batch 256
      atoll describe b/4 --latent 3x64x64 --memory 8GB --json
    """
    reads: dict[str, Any] = {"condition": "none"}
    if text is not None:
        reads = {"condition": "tokens", "text_width": text, "text_length": 77}
    try:
        config = settings.over(preset(architecture, latent=parse_latent(latent), **reads))
    except ValueError as error:
        raise UserError(f"{architecture}: {error}") from error
    settings.show(config, architecture)
    cost = account(config)
    machines = machines_within(gpu, gib(memory))
    found = [Forecast.of(cost, name, machine, batch, eight_bit) for name, machine in machines.items()]
    if as_json:
        flops = {"forward": cost.flops_forward, "training": cost.flops_training}
        content = {"architecture": config, "cost": cost, "flops_per_image": flops, "batch": batch, "training": found}
        typer.echo(json.dumps(TypeAdapter(dict[str, Any]).dump_python(content, mode="json"), indent=2))
        return
    quantities = {
        "image tokens": f"{config.image_tokens:,}",
        "parameters": f"{cost.parameters:,}",
        "weights in float32, GiB": f"{FLOAT32 * cost.parameters / 2**30:,.2f}",
        "GFLOPs per image, forward": f"{cost.flops_forward / 1e9:,.1f}",
        "GFLOPs per image, training": f"{cost.flops_training / 1e9:,.1f}",
    }
    print_table(
        "quantity >value", quantities.items(), f"{architecture}, {config.variant}, condition {config.condition}"
    )
    title = f"Training at batch {batch}, as predicted"
    print_table("|GPU >GiB >takes >micro >again >moments >images/s >kept", map(row_of, found), title)
    if narrow := [each.gpu for each in found if not each.machine.bfloat16]:
        print_line(f"without bfloat16, so in float32: {', '.join(narrow)}")
    print_line("micro: images per forward pass; again: blocks checkpointed; 8-bit needs torchao")
    print_line(f"takes: GiB, > where it is over {USABLE:.0%} of the GPU; kept: of the highest speed")


def parse_latent(text: str) -> tuple[int, int, int]:
    """`4x32x32` -> (4, 32, 32)."""
    parts = text.lower().split("x")
    if len(parts) != 3 or not all(part.isdecimal() for part in parts):
        raise UserError(f"--latent {text}: write channels, height and width, such as 4x32x32")
    channels, height, width = map(int, parts)
    return channels, height, width


def machines_within(gpu: str | None, memory: float | None) -> dict[str, Machine]:
    """Known GPUs by name, kept within `memory` GiB; without a name, all that have as much."""
    try:
        named = dict(GPUS) if gpu is None else {gpu: machine_named(gpu)}
    except ValueError as error:
        raise UserError(f"--gpu: {error}") from error
    if memory is None:
        return named
    found = {n: replace(m, memory=memory) for n, m in named.items() if gpu is not None or m.memory >= memory}
    if not found:
        raise UserError(f"--memory {memory:g}GB: no known GPU has so much; name one like it with --gpu")
    return found


def row_of(found: Forecast) -> tuple[str, ...]:
    """How one GPU would train: what it takes, how, and how fast."""
    fit, memory = found.chosen or found.least, found.machine.memory
    takes = f"{'' if found.chosen else '> '}{fit.memory_gib:.1f}"
    how = (str(fit.compute.micro_batch), str(fit.compute.checkpointed_blocks), fit.compute.moments)
    speed = f"{fit.images_per_s:,.0f}" if fit.images_per_s >= 10 else f"{fit.images_per_s:.1f}"
    return (found.gpu, f"{memory:g}", takes, *how, speed, f"{fit.images_per_s / found.unlimited.images_per_s:.0%}")
