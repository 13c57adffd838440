"""atoll sample: images from a prompt."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer

from ..artifacts import UserError
from ..evaluation.folder import add_samples
from ..evaluation.samples import SampleSettings
from ..mixture.routes import parse_route
from ..model import load
from ..sampling import Sampling
from .options import Devices, Memory, Settings, Threads, Weights, with_settings
from .progress import progress
from .tables import print_line


@with_settings(Sampling, "*")
def sample(
    run: Annotated[str, typer.Argument(help="Run, folder of one expert, or exported model.")],
    *,
    prompt: Annotated[list[str], typer.Option(help="A text, or a class by name or number. Repeatable.")] = [],
    negative_prompt: Annotated[str | None, typer.Option(help="What guidance leads away from.")] = None,
    n: Annotated[int, typer.Option("-n", help="Images per prompt.", min=1)] = 16,
    seed: Annotated[int, typer.Option(help="Image i uses seed + i.")] = 0,
    settings: Settings,
    router: Annotated[str | None, typer.Option(help="Another router of the run, such as router-blind.")] = None,
    batch: Annotated[int, typer.Option(help="Images per network call.", min=1)] = 64,
    threads: Threads = None,
    device: Devices = None,
    memory: Memory = None,
    weights: Weights = None,
    out: Annotated[Path, typer.Option(help="Folder for the images; one that has images gets more.")] = Path("samples"),
) -> None:
    """Generate images: one PNG each, and a sample grid with prompts and the experts' colors.

    The same command finds its images there; another one adds to them.
    A missing expert is skipped with a warning.

    \b
    Examples:
      atoll sample runs/demo --prompt "a handwritten three" -n 16 --route top-2 --out threes
      atoll sample runs/demo --prompt "a handwritten one" --prompt "a handwritten two" --guidance 1 --seed 7
      atoll sample runs/photos --prompt tulip --negative-prompt rose --memory 12GB --weights int8
      atoll sample runs/demo --prompt "a handwritten six" --grid shifted-3 --steps 20 --route-every 5
    """
    sampling = settings.over(Sampling())
    settings.show(sampling, "sampling")
    if sampling.route is not None:
        parse_route(sampling.route)  # refuse a wrong one before the model is loaded
    model = load(run, router=router, device=device, memory=memory, weights=weights)
    print_line(model.placement)
    if model.is_conditional and not prompt:
        raise UserError(f"--prompt: missing; name what to generate, this model {model.reads}")
    request = SampleSettings(
        prompts=tuple(text for text in model.titles(prompt or [""]) for _ in range(n)),
        negative_prompt=None if negative_prompt is None else model.titles([negative_prompt])[0],
        seed=seed,
        sampling=sampling,
        batch=batch,
        threads=threads or torch.get_num_threads(),
    )
    steps, count = sampling.steps, len(request.prompts)
    with progress() as display:
        images, new = add_samples(
            model, request, out, progress=lambda done, total: display("sampling", done // steps, total // steps)
        )
    state = "already there" if not new else f"{count} images" if count == images else f"{count} images, now {images}"
    print_line(f"{state}: {out}/sheet.png")
