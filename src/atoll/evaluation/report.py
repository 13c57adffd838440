"""report.html: one file that shows who painted what, how well, and why it is exact."""

from __future__ import annotations

import io
import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from importlib import resources
from string import Template
from typing import Any

from PIL import Image
from torch import Tensor

from ..artifacts import Artifact, Store, find
from ..ensemble.versions import open_ensemble, open_reference, place_of
from ..islands.expert import read_expert_card
from ..router.card import read_router_card
from .exactness import TIMES, fusion_errors
from .figures import data_uri, heat_map, lines
from .samples import read_samples
from .sheet import expert_colour, painted_sheet, rows_by_prompt

PER_PROMPT = 12  # images of each prompt shown for an arm
PROMPTS = 10


def write_report(run: Store, evaluation: dict[str, Any], out: Store) -> None:
    """Write report.html and samples.png to `out`, where the evaluation's samples are."""
    page = Page(run, evaluation, out)
    template = Template(resources.files(__package__).joinpath("report.html").read_text())
    html = template.substitute(
        title=escape(run.name),
        summary=page.summary(),
        samples=page.samples(),
        clusters=page.clusters(),
        heat=page.heat(),
        router=page.router(),
        curves=page.curves(),
        numbers=page.numbers(),
        verdict=page.verdict(),
        exact=page.exact(),
        settings=page.settings(),
    )
    out.write("report.html", html.encode())
    stream = io.BytesIO()
    page.hero(tile=48).save(stream, format="PNG", optimize=True)
    out.write("samples.png", stream.getvalue())


@dataclass(frozen=True)
class Painted:
    """One arm's images and how they came about."""

    arm: dict[str, Any]
    images: Tensor
    record: dict[str, Any]

    @property
    def title(self) -> str:
        if self.arm["model"] == "monolith":
            return f"monolith, guidance {self.arm['guidance']:g}"
        router = f", {self.arm['router']}" if self.arm["router"] else ""
        return f"{self.arm['route']}, guidance {self.arm['guidance']:g}{router}"

    def sheet(self, tile: int, per_prompt: int = PER_PROMPT) -> Image.Image:
        """Up to ten prompts, one row each."""
        rows, labels = rows_by_prompt(self.record["prompts"], per_prompt)
        first = [place for place, label in enumerate(labels) if label or place == 0][:PROMPTS]
        rows, labels = [rows[place] for place in first], [labels[place] for place in first]
        return painted_sheet(self.images, rows, self.record.get("expert_of_image"), tile=tile, labels=labels)


class Page:
    """The sections of the report, each a piece of HTML."""

    def __init__(self, run: Store, evaluation: dict[str, Any], out: Store) -> None:
        self.run = run
        self.evaluation = evaluation
        self.version = open_ensemble(run)
        self.missing = sorted({cluster for arm in evaluation["arms"] for cluster in arm["missing"]})
        self.experts = [member for member in self.version.serving if member.cluster not in self.missing]
        self.painted = []
        for arm in evaluation["arms"]:
            images, record = read_samples(Artifact.open(out.child("samples", arm["folder"]), "samples"))
            self.painted.append(Painted(arm, images, record))

    def names(self) -> list[str]:
        """Of all clusters, those without an expert too."""
        kinds = {m.cluster: m.objective.split(" ")[0] for m in self.experts}
        return [f"{k}: {kinds.get(k, 'missing')}" for k in range(self.version.clusters)]

    def hero(self, tile: int) -> Image.Image:
        """The best ensemble arm of the evaluation."""
        arms = [p for p in self.painted if p.arm["model"] == "ensemble" and not p.arm["router"]]
        best = max(arms, key=lambda p: (p.arm["recognised"] or 0.0, -p.arm["frechet"]))
        return best.sheet(tile)

    def summary(self) -> str:
        kinds = [member.objective for member in self.experts]
        counts = ", ".join(f"{kinds.count(kind)} with {escape(kind)}" for kind in dict.fromkeys(kinds))
        arms = [p.arm for p in self.painted if p.arm["model"] == "ensemble" and not p.arm["router"]]
        right = max((arm["recognised"] or 0.0 for arm in arms), default=0.0)
        seen = f" A classifier recognises up to {right:.1%} of their images as what was asked for." if right else ""
        return (
            f"{len(kinds)} experts, {counts}, each trained alone in a process of its own on one cluster of the data. "
            f"They have never exchanged a gradient, a weight or a sample. A router that sees {self._router_sees()} "
            f"fuses them.{seen}{self._without()}"
        )

    def _without(self) -> str:
        if not self.missing:
            return ""
        return f" <b>Painted without an expert for cluster {', '.join(map(str, self.missing))}.</b>"

    def _router_sees(self) -> str:
        assert self.version.router is not None, "an evaluated ensemble has a router"
        card = read_router_card(open_reference(self.run, self.version.router, "router"))
        blind = card.architecture.trunk.condition == "none"
        return "the noisy image and the time" if blind else "the noisy image, the time and the prompt"

    def samples(self) -> str:
        legend = "".join(
            f'<span class="key"><i style="background:{expert_colour(m.cluster)}"></i>expert {m.cluster} '
            f"<small>{escape(m.objective)}</small></span>"
            for m in self.experts
        )
        sheets = "".join(
            f'<figure><img class="pixels" src="{data_uri(p.sheet(tile=24))}" alt="samples: {escape(p.title)}">'
            f"<figcaption>{escape(p.title)}</figcaption></figure>"
            for p in self._in_order()
        )
        return f'<p class="legend">{legend}</p><div class="gallery">{sheets}</div>'

    def _in_order(self) -> list[Painted]:
        """Stronger guidance first; within it the ensemble's own router, the monolith, other routers; top-k first."""

        def rank(painted: Painted) -> tuple[float, int, bool, str]:
            arm = painted.arm
            group = 1 if arm["model"] == "monolith" else 2 if arm["router"] else 0
            return -arm["guidance"], group, not (arm["route"] or "").startswith("top-"), arm["name"]

        return sorted(self.painted, key=rank)

    def clusters(self) -> str:
        partition = open_reference(self.run, self.version.partition, "partition")
        sizes = json.loads(partition.read("sizes.json"))["clusters"]
        cards = []
        for member in self.experts:
            sheet = Image.open(partition.file(f"sheets/{member.cluster:02d}.png"))
            score = member.yardsticks
            measured = (
                ""
                if score is None
                else f"<br>holdout error <b>{score.inside:.3f}</b>, outside its cluster "
                f"{'-' if score.outside is None else f'{score.outside:.3f}'}, a Gaussian's {score.gaussian:.3f}"
            )
            cards.append(
                f'<figure class="card" style="border-top-color:{expert_colour(member.cluster)}">'
                f'<img src="{data_uri(sheet)}" alt="real samples of cluster {member.cluster}">'
                f"<figcaption><b>cluster {member.cluster}</b>, {sizes[member.cluster]['train']:,} training images"
                f"<br>{escape(member.objective)}{measured}</figcaption></figure>"
            )
        return f'<div class="cards">{"".join(cards)}</div>'

    def heat(self) -> str:
        maps = []
        for p in self._in_order():
            if "times" in p.record and not p.arm["router"]:
                chart = heat_map(p.record["times"], p.record["experts_at_time"], self.names())
                maps.append(f"<figure>{chart}<figcaption>{escape(p.title)}</figcaption></figure>")
        return f'<div class="charts">{"".join(maps[:4])}</div>'

    def router(self) -> str:
        curves: dict[str, tuple[Sequence[float], Sequence[float]]] = {}
        assert self.version.router is not None
        own = self.version.router.path
        for folder in dict.fromkeys([own, *(p.arm["router"] for p in self.painted if p.arm["router"])]):
            artifact = find(self.run.child(*folder.split("/")))
            if artifact is None:
                continue
            table = json.loads(artifact.read("accuracy.json"))
            curves[folder] = (table["t"], table["accuracy"])
            if folder == own:
                curves[f"{own}, prompt dropped"] = (table["t"], table["accuracy_unconditional"])
        chart = lines(curves, x="t, from data (0) to noise (1)", y="right cluster, unseen samples", percent=True)
        return f"<figure>{chart}</figure>"

    def curves(self) -> str:
        experts = {f"expert {m.cluster} ({m.objective.split(' ')[0]})": place_of(self.run, m) for m in self.experts}
        monolith = self.version.monolith
        places = experts | ({} if monolith is None else {"monolith": place_of(self.run, monolith)})
        colours = {name: expert_colour(m.cluster) for name, m in zip(experts, self.experts, strict=True)}
        colours |= {"monolith": "#1f2933"}
        charts = []
        for key, label in (
            ("yardstick", "velocity error on the validation set"),
            ("loss", "training loss, own objective"),
        ):
            curves = {}
            for name, place in places.items():
                artifact = find(place)
                rows = (
                    [] if artifact is None else [json.loads(row) for row in artifact.read("metrics.jsonl").splitlines()]
                )
                rows = [row for row in rows if key in row]
                if rows:
                    # images as a share of the budget: the monolith sees K times as many
                    curves[name] = ([row["images"] / rows[-1]["images"] for row in rows], [row[key] for row in rows])
            chart = lines(curves, x="share of the budget", y=label, colours=colours, dashed=["monolith"], log=True)
            charts.append(f"<figure>{chart}</figure>")
        return f'<div class="charts">{"".join(charts)}</div>'

    def numbers(self) -> str:
        rows = []
        for p in self._in_order():
            arm = p.arm
            cells = [p.title, _percent(arm["recognised"]), f"{arm['frechet']:.1f}", f"{arm['nearest_median']:.2f}"]
            rows.append("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>")
        floors, count = self.evaluation["floors"], self.evaluation["plan"]["count"]
        real = [
            (
                "real: one half against the other",
                _percent(floors["recogniser_accuracy"]) + " (unseen, 5-fold)",
                f"{floors['frechet_half_against_half']:.1f}",
                f"{floors['nearest_leave_one_out_median']:.2f} (leave one out)",
            ),
            (f"real: {count:,} against all", "", f"{floors['frechet_count_against_all']:.1f}", ""),
        ]
        floor_rows = "".join('<tr class="floor">' + "".join(f"<td>{c}</td>" for c in row) + "</tr>" for row in real)
        head = (
            "<tr><th>arm</th><th>recognised as asked</th><th>Frechet distance</th><th>nearest training image</th></tr>"
        )
        return f"<table>{head}{''.join(rows)}{floor_rows}</table>"

    def verdict(self) -> str:
        table = self.evaluation["against_monolith"]
        if not table:
            return "<p>No monolith was trained; <code>atoll demo --compare</code> adds one.</p>"
        lines_ = []
        for guidance, row in sorted(table.items()):
            word = "ahead of" if row["ratio"] <= 1 else "<b>behind</b>"
            lines_.append(
                f"<li>At {escape(guidance)} the ensemble ({row['route']}) is {word} the monolith: Frechet distance "
                f"{row['ensemble']:.1f} against {row['monolith']:.1f}, ratio <b>{row['ratio']:.2f}</b>.</li>"
            )
        return (
            "<p>The monolith has an expert's architecture and number of steps, and K times its batch: as many images "
            f"in all as the experts together.</p><ul>{''.join(lines_)}</ul>"
        )

    def exact(self) -> str:
        cards = [read_expert_card(Artifact.open(place_of(self.run, member))) for member in self.experts]
        errors = fusion_errors([(card.schedule, card.kind) for card in cards])
        curves = {name: (TIMES.tolist(), values) for name, values in errors.items()}
        chart = lines(curves, x="t, from data (0) to noise (1)", y="relative error of the velocity", log=True)
        return f"<figure>{chart}</figure>"

    def settings(self) -> str:
        plan = self.evaluation["plan"]
        shown = {
            "command": shlex.join(["atoll", *sys.argv[1:]]),
            "seed": plan["seed"],
            "samples per arm": plan["count"],
            **self._samplings(),
            "features": f"{self.evaluation['features']}, times {plan['feature_scale']:g}",
            "ensemble": self.version.digest(),
            "data": self.evaluation["data"],
        }
        rows = "".join(f"<tr><td>{escape(k)}</td><td><code>{escape(str(v))}</code></td></tr>" for k, v in shown.items())
        return f"<table>{rows}</table>"

    def _samplings(self) -> dict[str, str]:
        """Every field of how the arms were sampled, with the different values it had."""
        samplings = [arm["sampling"] for arm in self.evaluation["arms"]]
        values = {name: dict.fromkeys(str(one[name]) for one in samplings) for name in samplings[0]}
        return {name.replace("_", " "): ", ".join(some).replace("None", "none") for name, some in values.items()}


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.1%}"
