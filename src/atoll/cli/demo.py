"""atoll demo: the whole pipeline on handwritten digits."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from ..data.sources import open_source
from ..demo import DEVICE, demo_settings, tiny_settings
from ..partition.methods import LARGEST_SEED
from ..pipeline.settings import write_once
from .run import place_for, run_and_print


def demo(
    out: Annotated[str, typer.Option(help="Folder of the run.")] = "runs/demo",
    seed: Annotated[int, typer.Option(help="Seed of everything.", min=0, max=LARGEST_SEED)] = 0,
    compare: Annotated[bool, typer.Option("--compare", help="Add a monolith, a blind router and more routes.")] = False,
    size: Annotated[Literal["demo", "tiny"], typer.Option(help="tiny takes seconds, for tests.")] = "demo",
) -> None:
    """Train eight experts on handwritten digits, two by DDPM and six by flow matching, and evaluate them together.

    It is `atoll run` on built-in data. The same command resumes.

    \b
    Examples:
      atoll demo
      atoll demo --out runs/mine --seed 1 --compare
    """
    run = place_for(out)
    settings = (tiny_settings if size == "tiny" else demo_settings)(seed)
    config = write_once(run, settings.model_copy(update={"compare": compare}))
    origin = open_source(config.source, config.prepare.source)
    run_and_print(run, config, origin, device=DEVICE)
