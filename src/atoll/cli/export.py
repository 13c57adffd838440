"""atoll export: an expert for people who use something else."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..artifacts import UserError
from ..convert import export as stage
from ..islands.expert import load_expert
from .bars import console


def export(
    expert: Annotated[str, typer.Argument(help="Folder of an expert")],
    out: Annotated[Path, typer.Option(help="Folder to write; must not exist")],
    to: Annotated[str, typer.Option(help="diffusers")] = "diffusers",
) -> None:
    """Write an expert as a diffusers folder; `atoll convert --from diffusers` reads it back bit for bit.

    Examples:

      atoll export runs/art/contributions/03-1f2e3d4c5b6a --to diffusers --out art-03

      atoll convert art-03 --from diffusers --out back
    """
    if to != "diffusers":
        raise UserError(f"--to {to}: only diffusers is known")
    for remark in stage.export(load_expert(expert), out):
        console.print(f"[yellow]note:[/] {remark}")
    console.print(f"diffusers folder in [bold]{out}[/bold]")
