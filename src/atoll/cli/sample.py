"""atoll sample: images from a prompt."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..artifacts import UserError, find
from ..ensemble.routes import parse_route
from ..evaluation.samples import SampleSettings, write_samples
from ..model import DEFAULT_SOLVER, load
from ..sampling import SOLVERS
from .bars import bars, console


def sample(
    run: Annotated[str, typer.Argument(help="A run, or the folder of one expert")],
    prompt: Annotated[list[str], typer.Option(help="What to paint; repeat it for several prompts")] = [],  # noqa: B006
    n: Annotated[int, typer.Option("-n", help="Images per prompt", min=1)] = 16,
    route: Annotated[str | None, typer.Option(help="Which experts to run; default: the ensemble's")] = None,
    steps: Annotated[int, typer.Option(help="Solver steps", min=1)] = 50,
    guidance: Annotated[float, typer.Option(help="Classifier-free guidance; 1 is none")] = 2.0,
    guidance_weights: Annotated[str, typer.Option(help="own (exact) or conditional (cheaper)")] = "own",
    solver: Annotated[str, typer.Option(help=f"One of {', '.join(SOLVERS)}")] = DEFAULT_SOLVER,
    router: Annotated[str | None, typer.Option(help="Another router folder of the run, such as router-blind")] = None,
    seed: Annotated[int, typer.Option(help="Image i uses seed + i")] = 0,
    batch: Annotated[int, typer.Option(help="Images per network call", min=1)] = 64,
    threads: Annotated[int, typer.Option(help="CPU threads", min=1)] = 1,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, mps; default: cuda if there is one")] = None,
    out: Annotated[Path, typer.Option(help="Folder for the PNGs and samples.json")] = Path("samples"),
) -> None:
    """Paint images. Writes one PNG per image, a sheet of all, and samples.json with every setting.

    Routes: top-K, full, threshold-P, nucleus-P, sampled. An expert that is missing stops nothing: its
    weight goes to the others, and a line says so.

    Examples:

      atoll sample runs/demo --prompt "a handwritten three" -n 16 --route top-2 --out threes

      atoll sample runs/demo --prompt "a handwritten one" --prompt "a handwritten two" --guidance 1 --seed 7
    """
    if route is not None:
        parse_route(route)  # before the model loads
    check_solver(solver)
    if guidance_weights not in ("own", "conditional"):
        raise UserError(f"--guidance-weights {guidance_weights}: use own or conditional")
    model = load(run, router=router, device=device)
    conditional = model.text is not None or model.classes is not None
    if conditional and not prompt:
        raise UserError('--prompt: missing; say what to paint, for example --prompt "a handwritten three"')
    settings = SampleSettings(
        prompts=tuple(text for text in prompt or [""] for _ in range(n)),
        seed=seed,
        steps=steps,
        guidance=guidance if conditional else 1.0,  # nothing to guide towards
        guidance_weights=guidance_weights,
        route=route or model.default_route,
        solver=solver,
        batch=batch,
        threads=threads,
    )
    there = find(out) is not None
    with bars() as bar:
        write_samples(model, settings, out, progress=lambda done, total: bar("painting", done // steps, total // steps))
    console.print(f"{'already there' if there else f'{len(settings.prompts)} images'}: [bold]{out}/sheet.png[/bold]")


def check_solver(name: str) -> None:
    if name not in SOLVERS:
        raise UserError(f"--solver {name}: not known; use one of {', '.join(SOLVERS)}")
