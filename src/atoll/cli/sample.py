"""atoll sample: images from a prompt."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..artifacts import UserError, find
from ..evaluation.samples import SampleSettings, write_samples
from ..model import load
from ..sampling import Sampling
from .bars import bars, console
from .sampling_options import Device, Memory, Weights, sampling_options


@sampling_options()
def sample(
    run: Annotated[str, typer.Argument(help="A run, the folder of one expert, or an exported model")],
    *,
    prompt: Annotated[list[str], typer.Option(help="What to paint; repeat it for several prompts")] = [],  # noqa: B006
    n: Annotated[int, typer.Option("-n", help="Images per prompt", min=1)] = 16,
    seed: Annotated[int, typer.Option(help="Image i uses seed + i")] = 0,
    sampling: Sampling,
    router: Annotated[str | None, typer.Option(help="Another router folder of the run, such as router-blind")] = None,
    batch: Annotated[int, typer.Option(help="Images per network call", min=1)] = 64,
    threads: Annotated[int, typer.Option(help="CPU threads", min=1)] = 1,
    device: Device = None,
    memory: Memory = None,
    weights: Weights = None,
    out: Annotated[Path, typer.Option(help="Folder for the PNGs and samples.json")] = Path("samples"),
) -> None:
    """Paint images. Writes one PNG per image, a sheet of all, and samples.json with every setting.

    Routes: top-K, full, threshold-P, nucleus-P, sampled (one expert per step),
    fixed (one per image). See docs/sampling.md. An expert that is missing stops
    nothing: its weight goes to the others, and a line says so.

    Examples:

      atoll sample runs/demo --prompt "a handwritten three" -n 16 --route top-2 --out threes

      atoll sample runs/demo --prompt "a handwritten one" --prompt "a handwritten two" --guidance 1 --seed 7

      atoll sample runs/photos --prompt "a red tulip" --memory 12GB --weights int8

      atoll sample runs/demo --prompt "a handwritten six" --grid shifted-3 --steps 20 --route-every 5
    """
    model = load(run, router=router, device=device, memory=memory, weights=weights)
    console.print(model.said, soft_wrap=True, highlight=False)
    if model.is_conditional and not prompt:
        raise UserError('--prompt: missing; say what to paint, for example --prompt "a handwritten three"')
    settings = SampleSettings(
        prompts=tuple(text for text in prompt or [""] for _ in range(n)),
        seed=seed,
        sampling=sampling,
        batch=batch,
        threads=threads,
    )
    there = find(out) is not None
    steps = sampling.steps
    with bars() as bar:
        write_samples(model, settings, out, progress=lambda done, total: bar("painting", done // steps, total // steps))
    console.print(f"{'already there' if there else f'{len(settings.prompts)} images'}: [bold]{out}/sheet.png[/bold]")
