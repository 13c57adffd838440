"""atoll export: a model for people who use something else."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from ..artifacts import Store, UserError
from ..convert import export as stock
from ..convert.release import export_pipeline
from ..islands.expert import load_expert
from ..model import load
from .tables import print_line


def export(
    run: Annotated[str, typer.Argument(help="Run, or folder of one expert.")],
    out: Annotated[Path, typer.Option(help="Folder to write; must not exist.")],
    to: Annotated[Literal["diffusers", "transformer"], typer.Option(help="All, or one expert.")] = "diffusers",
    router: Annotated[str | None, typer.Option(help="Another router of the run, such as router-blind.")] = None,
) -> None:
    """Write a model as a folder that others can use without atoll.

    --to diffusers: a pipeline, for `DiffusionPipeline.from_pretrained(FOLDER, trust_remote_code=True)`.
    --to transformer: one expert as diffusers' DiTTransformer2DModel or PixArtTransformer2DModel, if it is one.

    \b
    Examples:
      atoll export runs/demo --to diffusers --out demo-pipeline
      atoll sample demo-pipeline --prompt "a handwritten three"
      atoll export runs/art/contributions/03-1f2e3d4c5b6a --to transformer --out art-03
    """
    if to == "diffusers":
        model = load(run, router=router, device="cpu")
        export_pipeline(model.body, out, Store.at(run))
        experts = len(model.body.placed.experts)
        count = "one expert" if experts == 1 else f"{experts} experts"
        return print_line(f"diffusers pipeline of {count} in {out}; read its README.md")
    if router is not None:
        raise UserError(f"--router {router}: --to transformer writes one expert, which has none; leave it out")
    for remark in stock.export(load_expert(run), out):
        print_line(f"note: {remark}")
    print_line(f"diffusers transformer in {out}")
