"""The figure of docs/process.md: the true velocity, the bridged one and the literal one.

python benchmarks/oracle_figure.py docs/process.svg
"""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
from matplotlib.axes import Axes

from atoll.diffusion import Bridge, CosineVP, Denoiser, Kind, LinearFlow
from atoll.mixture import Mixture
from oracle import REFERENCE, WORLD, over_time

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))
from closed_form import ExactDenoiser, ExactRouter, GaussianWorld, ImperfectDenoiser
from paper_fusion import PaperFusion

# blue and vermilion of Okabe and Ito's palette: told apart by every eye, and in grey
TRUE, BRIDGED, LITERAL, OTHER = "#000000", "#0072B2", "#D55E00", "#777777"


def mixed(world: GaussianWorld, wrap: type[Bridge] | type[PaperFusion]) -> Mixture:
    """The paper's mix: half of the clusters as cosine epsilon experts, the rest as flow experts; all ideal."""
    half = world.cluster_count // 2
    trained = [(CosineVP(), Kind.EPSILON)] * half + [(LinearFlow(), Kind.VELOCITY)] * half
    experts: list[Denoiser] = [wrap(ExactDenoiser(world.cluster(k), *how)) for k, how in enumerate(trained)]
    return Mixture.of(experts, ExactRouter(world))


def one_dimension(axes: Axes) -> None:
    """The velocity field itself at t = 0.5, for two clusters on a line."""
    world = GaussianWorld(
        weights=torch.tensor([0.6, 0.4], dtype=torch.float64),
        means=torch.tensor([[-1.1], [0.9]], dtype=torch.float64),
        covariances=torch.tensor([[[0.10]], [[0.04]]], dtype=torch.float64),
        clusters=torch.tensor([0, 1]),
        labels=torch.tensor([0, 1]),
    )
    x = torch.linspace(-2.2, 2.2, 221, dtype=torch.float64)
    t = torch.full_like(x, 0.5)

    def velocity(denoiser: Denoiser) -> list[float]:
        return denoiser(x[:, None], t, None).value[:, 0].tolist()

    axes.plot(x, velocity(ExactDenoiser(world, REFERENCE, Kind.VELOCITY)), color=TRUE, lw=1.2, label="true")
    axes.plot(x[::8], velocity(mixed(world, Bridge))[::8], "o", ms=4, mfc="none", color=BRIDGED, label="bridged")
    axes.plot(x, velocity(mixed(world, PaperFusion)), "--", color=LITERAL, lw=1.4, label="literal")
    axes.set(title="Velocity at t = 0.5\nepsilon expert left, flow expert right", xlabel="x", ylabel="v(x, t)")
    axes.legend(frameon=False)


def ideal_experts(axes: Axes) -> None:
    times = [0.001, 0.003, *[i / 100 for i in range(1, 100)], 0.997, 0.999]
    floor = 1e-17  # a log axis has no zero

    def line(denoiser: Denoiser, style: str, color: str, label: str) -> None:
        axes.semilogy(
            times, [max(e, floor) for e in over_time(denoiser, times)], style, color=color, lw=1.4, label=label
        )

    line(mixed(WORLD, PaperFusion), "--", LITERAL, "literal")
    line(mixed(WORLD, Bridge), "-", BRIDGED, "bridged, limit 100")
    axes.set(title="Ideal experts\n2 cosine epsilon + 2 flow", xlabel="t", ylim=(1e-17, 1e1))
    axes.set_ylabel("relative error of the velocity")
    axes.legend(frameon=False, loc="center left", bbox_to_anchor=(0.0, 0.5))
    axes.annotate("held at the limit", (0.995, 1e-4), (0.56, 1e-5), color=BRIDGED, arrowprops={"arrowstyle": "-"})


def imperfect_expert(axes: Axes) -> None:
    ratio = torch.logspace(-2, 4, 61, dtype=torch.float64)
    times = REFERENCE.time_at(-2.0 * ratio.log()).tolist()

    def off(kind: Kind) -> Denoiser:
        return ImperfectDenoiser(ExactDenoiser(WORLD, CosineVP(), kind), 0.01)

    def line(denoiser: Denoiser, style: str, color: str, label: str) -> None:
        axes.loglog(ratio, over_time(denoiser, times), style, color=color, lw=1.4, label=label)

    line(PaperFusion(off(Kind.EPSILON)), "--", LITERAL, "epsilon, literal")
    line(Bridge(off(Kind.EPSILON), limit=None), ":", OTHER, "epsilon, no limit")
    line(Bridge(off(Kind.EPSILON)), "-", BRIDGED, "epsilon, limit 100")
    line(Bridge(off(Kind.V)), "-.", OTHER, "v")
    axes.set(title="Experts 1 % off\non the cosine path", xlabel="noise over signal, t / (1 - t)", ylim=(3e-3, 3e2))
    axes.legend(frameon=False, loc="upper left")


def draw(path: Path) -> None:
    # text as text and no date: the same file from the same code
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "atoll", "font.size": 9, "axes.titlesize": 10})
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(11, 3.6), layout="constrained")
    one_dimension(left)
    ideal_experts(middle)
    imperfect_expert(right)
    for axes in (left, middle, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None, dpi=150)
    plt.close(figure)


if __name__ == "__main__":
    torch.set_num_threads(1)
    draw(Path(sys.argv[1] if len(sys.argv) > 1 else "docs/process.svg"))
