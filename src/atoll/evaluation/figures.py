"""Charts for the report, as SVG text, and pictures as part of a page."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from PIL import Image

from .sheet import INK, RULE, expert_color

TIME_AXIS = "t, from noise (1) to data (0)"  # as images are painted, in every chart


def lines(
    curves: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    *,
    x: str,
    y: str,
    colors: Mapping[str, str] | None = None,
    dashed: Sequence[str] = (),
    log: bool = False,
    percent: bool = False,
    falling: bool = False,
) -> str:
    """A line chart: name -> (xs, ys). With `falling`, x goes down from left to right."""
    figure, axes = _axes(x, y)
    for place, (name, (xs, ys)) in enumerate(curves.items()):
        color = (colors or {}).get(name, expert_color(place))
        axes.plot(xs, ys, label=name, color=color, linewidth=1.8, linestyle="--" if name in dashed else "-")
    if log:
        axes.set_yscale("log")
        low, high = axes.get_ylim()
        if high < 1e3 * low:  # plain numbers read better than powers of ten
            axes.yaxis.set_major_locator(matplotlib.ticker.LogLocator(subs=(1.0, 2.0, 5.0)))
            axes.yaxis.set_minor_locator(matplotlib.ticker.NullLocator())
            axes.yaxis.set_major_formatter(matplotlib.ticker.FuncFormatter(lambda value, _: f"{value:g}"))
    if falling:
        axes.invert_xaxis()
    if percent:
        axes.set_ylim(0, 1.02)
        axes.yaxis.set_major_formatter(matplotlib.ticker.PercentFormatter(1.0, decimals=0))
    axes.legend(frameon=False, fontsize=8, ncols=2 if len(curves) > 4 else 1, labelcolor=INK)
    return _svg(figure)


def heat_map(times: Sequence[float], shares: Sequence[Sequence[float]], names: Sequence[str]) -> str:
    """Share of each expert (rows) over time (columns, from noise on the left to data on the right)."""
    figure, axes = _axes(TIME_AXIS, "")
    table = np.array(shares).T
    picture = axes.imshow(table, aspect="auto", cmap="viridis", vmin=0, vmax=max(0.01, table.max()))
    ticks = np.linspace(0, len(times) - 1, min(6, len(times))).round().astype(int)
    axes.set_xticks(ticks, [f"{times[i]:.2f}" for i in ticks])
    axes.set_yticks(range(len(names)), names)
    axes.grid(False)
    bar = figure.colorbar(picture, ax=axes, format=matplotlib.ticker.PercentFormatter(1.0, decimals=0), pad=0.02)
    bar.outline.set_visible(False)
    bar.ax.tick_params(labelsize=8, colors=INK)
    return _svg(figure)


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


def _svg(figure: Figure) -> str:
    stream = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "font.family": "sans-serif", "svg.hashsalt": "atoll"}):
        figure.savefig(stream, format="svg", transparent=True, metadata={"Date": None})
    text = stream.getvalue()
    return text[text.index("<svg") :]


def data_uri(picture: Image.Image) -> str:
    stream = io.BytesIO()
    picture.save(stream, format="PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(stream.getvalue()).decode()
