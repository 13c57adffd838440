"""atoll demo: the whole pipeline on handwritten digits."""

from __future__ import annotations

from typing import Annotated

import typer

from ..artifacts import UserError
from ..data.sources import open_source
from ..demo import DEVICE, demo_settings, tiny_settings
from ..pipeline.settings import write_once
from ..training.machines import this_machine
from .run import carry_out_and_tell, check_seed, place_for

SIZES = {"demo": demo_settings, "tiny": tiny_settings}


def demo(
    out: Annotated[str, typer.Option(help="Folder of the run")] = "runs/demo",
    seed: Annotated[int, typer.Option(help="Seed of everything", min=0)] = 0,
    compare: Annotated[bool, typer.Option(help="Add a monolith, a blind router, more routes and guidance 1")] = False,
    size: Annotated[str, typer.Option(help="demo, or tiny: takes seconds and learns nothing")] = "demo",
) -> None:
    """Eight experts that never met learn handwritten digits, two by DDPM and six by flow matching, and paint together.

    It is `atoll run` on the built-in digits: the same code, stages and files.
    Run it again to go on after a stop of any kind, or to see that everything
    is there.

    Examples:

      atoll demo

      atoll demo --out runs/mine --seed 1 --compare
    """
    if size not in SIZES:
        raise UserError(f"--size {size}: use demo or tiny")
    check_seed(seed)
    run = place_for(out)
    settings = write_once(run, SIZES[size](seed))
    origin, prompt = open_source(settings.source), "a handwritten three"
    carry_out_and_tell(run, settings, origin, this_machine(DEVICE), compare=compare, device=DEVICE, prompt=prompt)
