"""atoll distill: all experts in, one dense network out."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..artifacts import Store, UserError, find
from ..distill.plan import DistillPlan, student_plan
from ..distill.stage import Teachers
from ..distill.stage import distill as run_distillation
from ..mixture.routes import parse_route
from ..training.distributed import is_main
from ..training.resources import Resources
from . import options
from .options import Settings, refuse, with_settings
from .progress import progress
from .tables import print_line

PROMPTS = options.file_option("With --from-samples: one prompt per line.")


@with_settings(DistillPlan, "start", "data_weight", "route")
def distill(
    run: Annotated[str, typer.Argument(help="Run whose experts are the teachers.")],
    *,
    out: options.WorkFolder,
    objective: Annotated[str | None, typer.Option(help="flow, ddpm or v, whatever the teachers have.")] = None,
    settings: Settings,
    from_samples: Annotated[bool, typer.Option("--from-samples", help="Learn on generated images, no data.")] = False,
    prompts: Annotated[Path | None, PROMPTS] = None,
    seed: Annotated[int, typer.Option(help="Seed of weights, noise and sequence.")] = 0,
    device: options.Device = None,
    memory: options.Memory = None,
    checkpoint_seconds: options.CheckpointSeconds = None,
    tensorboard: options.Tensorboard = None,
) -> None:
    """Train one dense network on the predictions of all experts. Experts may have different objectives.

    For every training image the student learns the prediction of its own cluster's expert.
    By default it has the architecture of the largest expert, starts from the best one and sees a quarter of all
    their images. The result is an expert of all clusters: `sample`, `evaluate` and `export` take its folder.

    \b
    Examples:
      atoll distill runs/demo --out student
      atoll distill runs/demo --out student --data-weight 0.5
      atoll distill runs/demo --out student --start random --set training.images=96000
      atoll distill runs/demo --out student --objective ddpm --set network.depth=4
      atoll distill runs/demo --out student --from-samples --prompts prompts.txt
      atoll sample student --prompt "a handwritten three"
    """
    learned, route = settings.without("compute"), settings.changes.get("route")
    if not from_samples:
        refuse({"--prompts": prompts, "--route": route}, "no --from-samples")
    if route is not None:
        parse_route(route)
    place = Store.at(run)
    plan = learned.over_plan(student_plan(Teachers.of(place).orders, objective=objective, seed=seed))
    if from_samples:
        plan = plan.from_samples(() if prompts is None else read_prompts(prompts))
    settings.show(plan, f"a student of {place.name}")
    there, leads = find(out) is not None, is_main()  # of several processes that train together one prints
    with progress(quiet=there or not leads, tensorboard=tensorboard if leads else None) as display:
        artifact = run_distillation(
            place,
            out,
            plan,
            resources=Resources(device, options.gib(memory), settings.part("compute")),
            checkpoint_seconds=checkpoint_seconds,
            watch=display.training("training the student"),
        )
    if leads and artifact is not None:
        print_line(f"student {artifact.digest[:12]} {'already there' if there else 'in'} {out}")


def read_prompts(path: Path) -> tuple[str, ...]:
    lines = [line.strip() for line in options.read_text("--prompts", path).splitlines()]
    if not any(lines):
        raise UserError(f"--prompts {path}: holds no prompt; write one per line")
    return tuple(line for line in lines if line)
