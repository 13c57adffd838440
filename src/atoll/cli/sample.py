"""atoll sample: images from a prompt."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer

from ..artifacts import UserError
from ..evaluation.folder import add_samples
from ..evaluation.samples import SampleSettings
from ..model import load
from ..sampling import Sampling
from .progress import console, progress
from .sampling_options import Device, Memory, Threads, Weights, sampling_options


@sampling_options()
def sample(
    run: Annotated[str, typer.Argument(help="A run, the folder of one expert, or an exported model")],
    *,
    prompt: Annotated[
        list[str], typer.Option(help="What to paint: a text, or a class by name or number; repeat it for several")
    ] = [],  # noqa: B006
    negative_prompt: Annotated[str | None, typer.Option(help="What guidance is to lead away from")] = None,
    n: Annotated[int, typer.Option("-n", help="Images per prompt", min=1)] = 16,
    seed: Annotated[int, typer.Option(help="Image i uses seed + i")] = 0,
    sampling: Sampling,
    router: Annotated[str | None, typer.Option(help="Another router folder of the run, such as router-blind")] = None,
    batch: Annotated[int, typer.Option(help="Images per network call", min=1)] = 64,
    threads: Threads = None,
    device: Device = None,
    memory: Memory = None,
    weights: Weights = None,
    out: Annotated[Path, typer.Option(help="Folder for the images; one that has some gets more")] = Path("samples"),
) -> None:
    """Sample images. Writes one PNG per image, and a sheet of all with prompts and the experts' colors.

    A folder that holds images already gets these in addition; the same command
    again finds them there. Every setting is in calls/NNNN/samples.json.

    Routes: top-K, full, threshold-P, fixed (one expert per image). See docs/sampling.md.
    If an expert is missing, the others are weighted up, with a warning.

    Examples:

      atoll sample runs/demo --prompt "a handwritten three" -n 16 --route top-2 --out threes

      atoll sample runs/demo --prompt "a handwritten one" --prompt "a handwritten two" --guidance 1 --seed 7

      atoll sample runs/photos --prompt tulip --negative-prompt rose --memory 12GB --weights int8

      atoll sample runs/demo --prompt "a handwritten six" --grid shifted-3 --steps 20 --route-every 5
    """
    model = load(run, router=router, device=device, memory=memory, weights=weights)
    console.print(model.placement, soft_wrap=True, highlight=False)
    if model.is_conditional and not prompt:
        raise UserError(f"--prompt: missing; say what to paint, this model {model.reads}")
    settings = SampleSettings(
        prompts=tuple(text for text in model.titles(prompt or [""]) for _ in range(n)),
        negative_prompt=None if negative_prompt is None else model.titles([negative_prompt])[0],
        seed=seed,
        sampling=sampling,
        batch=batch,
        threads=threads or torch.get_num_threads(),
    )
    steps = sampling.steps
    with progress() as display:
        images, new = add_samples(
            model, settings, out, progress=lambda done, total: display("painting", done // steps, total // steps)
        )
    count = len(settings.prompts)
    state = "already there" if not new else f"{count} images" if count == images else f"{count} images, now {images}"
    console.print(f"{state}: [bold]{out}/sheet.png[/bold]", soft_wrap=True)
