"""partition.html: one self-contained page that shows what the clusters are."""

from __future__ import annotations

import base64
import html
from collections.abc import Sequence
from pathlib import Path
from typing import Any

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 72rem; padding: 0 1rem; color: #1a2b33; }
h1 { font-weight: 600; margin-bottom: 0; } .lead { color: #5b7079; margin-top: .2rem; }
table { border-collapse: collapse; margin: 1rem 0; } td, th { padding: .25rem .9rem .25rem 0; text-align: left; }
th { color: #5b7079; font-weight: 500; } td.n { text-align: right; font-variant-numeric: tabular-nums; }
.grid { display: grid; grid-template-columns: repeat(auto-fill, minmax(21rem, 1fr)); gap: 1.5rem; }
.card { border: 1px solid #dbe4e8; border-radius: 10px; padding: 1rem; background: #fbfdfe; }
.card h2 { margin: 0; font-size: 1.1rem; } .card img { width: 100%; border-radius: 6px; image-rendering: pixelated; }
.bar { height: 6px; background: #e3ecef; border-radius: 3px; margin: .4rem 0; }
.bar i { display: block; height: 100%; background: #1f8a94; border-radius: 3px; }
.words { color: #1f6f78; min-height: 1.5em; } .small { color: #5b7079; font-size: .85rem; }
"""


def write_report(
    path: Path,
    *,
    settings: dict[str, Any],
    data: dict[str, Any],
    sizes: Sequence[dict[str, int]],
    quality: dict[str, Any],
    told: Sequence[Sequence[str]],
    sheets: Path,
) -> None:
    largest = max(size["train"] for size in sizes)
    cards = "\n".join(
        card(k, size, told[k], largest, (sheets / f"{k:02d}.png").read_bytes()) for k, size in enumerate(sizes)
    )
    title = f"{len(sizes)} clusters of {data['count']:,} images"
    how = f"by {settings['by']}" + (f" ({data['features']['extractor']})" if settings["by"] == "features" else "")
    if settings["by"] == "label" and quality["unlabelled"]:
        how += f" (without one: {quality['unlabelled']:,}, by a hash of their id)"
    page = f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>{STYLE}</style></head><body>
<h1>{title}</h1>
<p class="lead">cut {html.escape(how)}, seed {settings["seed"]}; each island trains on one of them and sees no other</p>
{table(quality)}
<div class="grid">
{cards}
</div>
</body></html>
"""
    path.write_text(page)


def table(quality: dict[str, Any]) -> str:
    rows: list[tuple[str, float | None, str]] = [
        ("largest over smallest cluster", quality["balance"], "1 is perfectly even")
    ]
    if quality["silhouette"] is not None:
        rows.append(("silhouette of features", quality["silhouette"], "-1 to 1; above 0: nearer to the own cluster"))
    if quality["nmi"] is not None:
        meaning = "normalized mutual information with the labels; 1 is the same cut"
        rows.append(("agreement with labels", quality["nmi"]["clusters"], meaning))
        rows.append(("&emsp;clusters dealt at random instead", quality["nmi"]["random"], ""))
    cells = "".join(
        f'<tr><th>{name}</th><td class="n">{"none" if value is None else f"{value:.3f}"}</td>'
        f'<td class="small">{note}</td></tr>'
        for name, value, note in rows
    )
    return f"<table>{cells}</table>"


def card(k: int, size: dict[str, int], told: Sequence[str], largest: int, sheet: bytes) -> str:
    image = base64.b64encode(sheet).decode()
    lines = "".join(f'<div class="words">{html.escape(line)}</div>' for line in told)
    others = f"{size['validation']:,} validation, {size['holdout']:,} holdout"
    return f"""<section class="card"><h2>Cluster {k}</h2>
<div class="bar"><i style="width:{100 * size["train"] / largest:.1f}%"></i></div>
<div>{size["train"]:,} training images</div><div class="small">and {others}</div>
{lines}
<img alt="images of cluster {k}" src="data:image/png;base64,{image}"></section>"""
