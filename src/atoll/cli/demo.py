"""atoll demo: the whole pipeline on handwritten digits."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from ..artifacts import UserError
from ..demo import demo as run_demo
from ..demo import demo_size, tiny_size
from ..ensemble.versions import clean_run
from .bars import bars, console
from .tables import print_evaluation

SIZES = {"demo": demo_size, "tiny": tiny_size}


def demo(
    out: Annotated[str, typer.Option(help="Folder of the run")] = "runs/demo",
    seed: Annotated[int, typer.Option(help="Seed of everything")] = 0,
    compare: Annotated[bool, typer.Option(help="Add a monolith, a blind router, more routes and guidance 1")] = False,
    size: Annotated[str, typer.Option(help="demo, or tiny: takes seconds and learns nothing")] = "demo",
) -> None:
    """Eight experts that never met learn handwritten digits, two by DDPM and six by flow matching, and paint together.

    Everything goes through the same stages and files as the other verbs. Run it again to go on after a stop of
    any kind, or to see that everything is there.

    Examples:

      atoll demo

      atoll demo --out runs/mine --seed 1 --compare
    """
    if size not in SIZES:
        raise UserError(f"--size {size}: use demo or tiny")
    run = clean_run(out)
    if not run.is_local:
        raise UserError(f"--out {out}: the demo trains its islands on this machine; give a local folder")
    began = time.monotonic()
    with bars() as show:
        evaluation = run_demo(run, seed=seed, compare=compare, size=SIZES[size](), show=show)
    print_evaluation(evaluation)
    console.print(f"\neverything is there, after {time.monotonic() - began:.0f} s:")
    for name, what in (
        ("report.html", "who painted what, and how well"),
        ("samples.png", "a picture of it"),
        ("evaluation.json", "the numbers"),
        ("ensemble", "the model, version by version: `atoll sample " + out + ' --prompt "a handwritten three"`'),
    ):
        console.print(f"  [bold]{run.path / name}[/bold]  {what}", soft_wrap=True)
