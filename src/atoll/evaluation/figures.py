"""Charts for the report, as SVG text, and pictures as part of a page."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator, PercentFormatter
from PIL import Image

from .sheet import INK, RULE

TIME_AXIS = "t, from noise (1) to data (0)"  # as images are generated, in every chart


@dataclass(frozen=True)
class Curve:
    name: str
    x: Sequence[float]
    y: Sequence[float]
    color: str
    dashed: bool = False


def learning_curves(curves: Sequence[Curve], label: str) -> str:
    """Losses over the share of the training budget, on a logarithmic axis."""
    figure, axes = _axes("share of the training budget", label)
    _draw(axes, curves)
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    if high < 1e3 * low:  # plain numbers read better than powers of ten
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    return _svg(figure)


def accuracy_curves(curves: Sequence[Curve], label: str) -> str:
    """Fractions over time, from noise on the left to data on the right."""
    figure, axes = _axes(TIME_AXIS, label)
    _draw(axes, curves)
    axes.invert_xaxis()
    axes.set_ylim(0, 1.02)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    return _svg(figure)


def heat_map(times: Sequence[float], weights: Sequence[Sequence[float]], names: Sequence[str]) -> str:
    """Weight of each expert (rows) over time (columns, from noise on the left to data on the right)."""
    figure, axes = _axes(TIME_AXIS, "")
    table = np.array(weights).T
    picture = axes.imshow(table, aspect="auto", cmap="viridis", vmin=0, vmax=max(0.01, table.max()))
    ticks = np.linspace(0, len(times) - 1, min(6, len(times))).round().astype(int)
    axes.set_xticks(ticks, [f"{times[i]:.2f}" for i in ticks])
    axes.set_yticks(range(len(names)), names)
    axes.grid(False)
    bar = figure.colorbar(picture, ax=axes, format=PercentFormatter(1.0, decimals=0), pad=0.02)
    bar.outline.set_visible(False)
    bar.ax.tick_params(labelsize=8, colors=INK)
    return _svg(figure)


def data_uri(picture: Image.Image) -> str:
    with io.BytesIO() as stream:
        picture.save(stream, format="PNG", optimize=True)
        return "data:image/png;base64," + base64.b64encode(stream.getvalue()).decode()


def _axes(x: str, y: str) -> tuple[Figure, matplotlib.axes.Axes]:
    figure = Figure(figsize=(6.4, 3.1), layout="constrained")
    axes = figure.subplots()
    axes.set_xlabel(x, color=INK, fontsize=9)
    axes.set_ylabel(y, color=INK, fontsize=9)
    axes.tick_params(labelsize=8, colors=INK)
    axes.grid(color=RULE, linewidth=0.6)
    for side in axes.spines.values():
        side.set_visible(False)
    return figure, axes


def _draw(axes: matplotlib.axes.Axes, curves: Sequence[Curve]) -> None:
    for curve in curves:
        line = "--" if curve.dashed else "-"
        axes.plot(curve.x, curve.y, label=curve.name, color=curve.color, linewidth=1.8, linestyle=line)
    if curves:
        axes.legend(frameon=False, fontsize=8, ncols=2 if len(curves) > 4 else 1, labelcolor=INK)


def _svg(figure: Figure) -> str:
    stream = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "font.family": "sans-serif", "svg.hashsalt": "atoll"}):
        figure.savefig(stream, format="svg", transparent=True, metadata={"Date": None})
    text = stream.getvalue()
    return text[text.index("<svg") :]
