"""Pictures for the report: charts as SVG text, images as one PNG per sheet."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

# one colour per expert, told apart by people with any colour vision (Okabe and Ito); beyond eight they repeat
PALETTE = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#F0E442", "#8C564B")
INK, PAPER, RULE = "#1f2933", "#ffffff", "#d9dee3"


def expert_colour(k: int) -> str:
    return PALETTE[k % len(PALETTE)]


def lines(
    curves: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    *,
    x: str,
    y: str,
    colours: Mapping[str, str] | None = None,
    dashed: Sequence[str] = (),
    log: bool = False,
    percent: bool = False,
) -> str:
    """A line chart: name -> (xs, ys)."""
    figure, axes = _axes(x, y)
    for place, (name, (xs, ys)) in enumerate(curves.items()):
        colour = (colours or {}).get(name, expert_colour(place))
        axes.plot(xs, ys, label=name, color=colour, linewidth=1.8, linestyle="--" if name in dashed else "-")
    if log:
        axes.set_yscale("log")
        low, high = axes.get_ylim()
        if high < 1e3 * low:  # plain numbers read better than powers of ten
            axes.yaxis.set_major_locator(matplotlib.ticker.LogLocator(subs=(1.0, 2.0, 5.0)))
            axes.yaxis.set_minor_locator(matplotlib.ticker.NullLocator())
            axes.yaxis.set_major_formatter(matplotlib.ticker.FuncFormatter(lambda value, _: f"{value:g}"))
    if percent:
        axes.set_ylim(0, 1.02)
        axes.yaxis.set_major_formatter(matplotlib.ticker.PercentFormatter(1.0, decimals=0))
    axes.legend(frameon=False, fontsize=8, ncols=2 if len(curves) > 4 else 1, labelcolor=INK)
    return _svg(figure)


def heat_map(times: Sequence[float], shares: Sequence[Sequence[float]], names: Sequence[str]) -> str:
    """Share of each expert (rows) over time (columns, from noise on the left to data on the right)."""
    figure, axes = _axes("t, from noise (1) to data (0)", "")
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


def painted_sheet(
    images: Tensor,
    rows: Sequence[Sequence[int]],
    experts: Sequence[int] | None,
    *,
    tile: int,
    labels: Sequence[str] = (),
) -> Image.Image:
    """Rows of images, as indices into uint8 [N, C, H, W], each framed in the colour of its main expert."""
    frame, gap = 2, 3
    step = tile + 2 * frame + gap
    margin = 16 + max((int(_font(tile).getlength(text)) for text in labels), default=0) if labels else 0
    sheet = Image.new("RGB", (margin + step * max(map(len, rows)), step * len(rows)), PAPER)
    draw = ImageDraw.Draw(sheet)
    for r, row in enumerate(rows):
        if labels:
            draw.text((margin - 8, r * step + step // 2), labels[r], INK, _font(tile), anchor="rm")
        for c, i in enumerate(row):
            left, top = margin + c * step, r * step
            colour = RULE if experts is None else expert_colour(experts[i])
            draw.rectangle((left, top, left + tile + 2 * frame - 1, top + tile + 2 * frame - 1), fill=colour)
            pixels = images[i][0] if len(images[i]) == 1 else images[i].permute(1, 2, 0)
            picture = Image.fromarray(pixels.numpy()).resize((tile, tile), Image.Resampling.NEAREST)
            sheet.paste(picture, (left + frame, top + frame))
    return sheet


def _font(tile: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size=max(12, tile // 3))


def data_uri(picture: Image.Image) -> str:
    stream = io.BytesIO()
    picture.save(stream, format="PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(stream.getvalue()).decode()
