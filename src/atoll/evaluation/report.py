"""report.html: one file that shows who painted what, and how well."""

from __future__ import annotations

import io
import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib import resources
from string import Template
from typing import Any

from PIL import Image

from ..artifacts import Artifact, Store, find
from ..islands.expert import read_expert_card
from ..partition.quality import describe_clusters
from ..registry.versions import open_ensemble, open_reference, place_of
from ..router.card import read_router_card
from .figures import TIME_AXIS, data_uri, heat_map, lines
from .samples import StoredImages, spaced
from .scores import SCORES, number_title, number_written, other_numbers
from .sheet import expert_color, painted_sheet, rows_by_prompt

PER_PROMPT = 12  # images of each prompt shown for an arm
PROMPTS = 10
SMALL_TILE, LARGE_TILE = 24, 64
WIDEST_OF_A_PAIR = 600  # pixels of a sheet, beyond which two beside each other would be too small to see
NEAR, FAR = 0.6, 1.5  # distance to the nearest training image, of real images' own, below and above which one talks
MUCH_WORSE = 5.0  # Frechet distance, of the floor between halves of real data, beyond which samples are bad


def write_report(run: Store, evaluation: dict[str, Any], out: Store) -> None:
    """Write report.html and samples.png to `out`, where the evaluation's samples are."""
    page = Page(run, evaluation, out)
    template = Template(resources.files(__package__).joinpath("report.html").read_text())
    html = template.substitute(
        title=escape(run.name),
        headline=page.headline(),
        summary=page.summary(),
        samples=page.samples(),
        clusters=page.clusters(),
        heat=page.heat(),
        router=page.router(),
        curves=page.curves(),
        numbers=page.numbers(),
        by_cluster=page.by_cluster(),
        nearness=page.nearness(),
        verdict=page.verdict(),
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
    images: StoredImages
    record: dict[str, Any]

    @property
    def title(self) -> str:
        if self.arm["model"] == "monolith":
            return f"monolith, guidance {self.arm['guidance']:g}"
        if self.arm["model"] == "student":
            return f"student {self.arm['student']}, guidance {self.arm['guidance']:g}"
        router = f", {self.arm['router']}" if self.arm["router"] else ""
        return f"{self.arm['route']}, guidance {self.arm['guidance']:g}{router}"

    @property
    def tile(self) -> int:
        """Side of an image on the page: digits as they are, photographs so that one sees something."""
        return SMALL_TILE if self.images.shape[-1] <= SMALL_TILE else LARGE_TILE

    def sheet(self, tile: int, per_prompt: int = PER_PROMPT) -> Image.Image:
        """Up to ten prompts, one row each."""
        rows, labels = rows_by_prompt(self.record["prompts"], per_prompt)
        starts = [place for place, label in enumerate(labels) if label or place == 0]
        first = spaced(starts, min(PROMPTS, len(starts)))  # of all classes, not of the first
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
        self.starts = self._starts()
        self.painted = []
        for arm in evaluation["arms"]:
            artifact = Artifact.open(out.child("samples", arm["folder"]), "samples")
            self.painted.append(Painted(arm, StoredImages(artifact), json.loads(artifact.read("samples.json"))))

    def names(self) -> list[str]:
        """Of all clusters, those without an expert too."""
        kinds = {m.cluster: m.objective.split(" ")[0] for m in self.experts}
        return [f"{k}: {kinds.get(k, 'missing')}" for k in range(self.version.clusters)]

    def hero(self, tile: int) -> Image.Image:
        """The best of the ensemble with its own router; of what there is where that was not evaluated."""
        own = [p for p in self.painted if p.arm["model"] == "ensemble" and not p.arm["router"]]
        best = max(own or self.painted, key=lambda p: (p.arm["recognised"] or 0.0, -p.arm["frechet"]))
        return best.sheet(tile)

    def headline(self) -> str:
        return "Painted by experts that never met" if not self.starts else "Painted by experts trained apart"

    def summary(self) -> str:
        kinds = [member.objective for member in self.experts]
        found = dict.fromkeys(kinds)
        counts = ", ".join(f"{kinds.count(kind) if len(found) > 1 else 'all'} with {escape(kind)}" for kind in found)
        return (
            f"{len(kinds)} experts, {counts}, each trained alone in a process of its own on one cluster of the data. "
            f"{self._exchanged()} A router that sees {self._router_sees()} fuses them.{self._seen()}{self._without()}"
        )

    def _starts(self) -> dict[int, str]:
        """Clusters whose expert did not begin with random weights, and what with."""
        known = {member.digest: member for member in self.version.experts}
        starts = {}
        for member in self.experts:
            artifact = Artifact.open(place_of(self.run, member))
            start, origin = artifact.manifest.parents.get("init"), read_expert_card(artifact).origin
            if start in known:
                other = known[start]
                whose = "its own cluster" if other.cluster == member.cluster else f"cluster {other.cluster}"
                starts[member.cluster] = f"{other.name}, an expert of {whose}"
            elif start is not None or origin is not None:
                starts[member.cluster] = origin or f"expert {str(start)[:12]}, which is not of this run"
        return starts

    def _exchanged(self) -> str:
        """Who got weights from whom: the one thing that islands may have had in common."""
        if not self.starts:
            return "They have never exchanged a gradient, a weight or a sample."
        told = "; ".join(f"expert {k} from {escape(what)}" for k, what in sorted(self.starts.items()))
        return (
            "While training they exchanged no gradient, weight or sample. "
            f"<b>Not all began with random weights: {told}.</b>"
        )

    def _seen(self) -> str:
        arms = [p.arm for p in self.painted if p.arm["model"] == "ensemble" and not p.arm["router"]]
        right = max((arm["recognised"] for arm in arms if arm["recognised"] is not None), default=None)
        if right is None:
            return ""
        chance = self.evaluation["floors"].get("chance")
        against = "" if chance is None else f"; by chance it would be {chance:.1%}"
        return f" A classifier recognises up to {right:.1%} of their images as what was asked for{against}."

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
            f'<span class="key"><i style="background:{expert_color(m.cluster)}"></i>expert {m.cluster} '
            f"<small>{escape(m.objective)}</small></span>"
            for m in self.experts
        )
        sheets = [(p, p.sheet(p.tile)) for p in self._in_order()]
        figures = "".join(
            f'<figure><img{" class=pixels" if p.tile == SMALL_TILE else ""} src="{data_uri(sheet)}" '
            f'alt="samples: {escape(p.title)}"><figcaption>{escape(p.title)}</figcaption></figure>'
            for p, sheet in sheets
        )
        side_by_side = " pairs" if max(sheet.width for _, sheet in sheets) <= WIDEST_OF_A_PAIR else ""
        return f'<p class="legend">{legend}</p><div class="gallery{side_by_side}">{figures}</div>'

    def _in_order(self) -> list[Painted]:
        """Stronger guidance first; within it the ensemble's own router, the monolith, other routers; top-k first."""

        def rank(painted: Painted) -> tuple[float, int, bool, str]:
            arm = painted.arm
            group = 1 if arm["model"] != "ensemble" else 2 if arm["router"] else 0
            return -arm["guidance"], group, not (arm["route"] or "").startswith("top-"), arm["name"]

        return sorted(self.painted, key=rank)

    def clusters(self) -> str:
        partition = open_reference(self.run, self.version.partition, "partition")
        sizes = json.loads(partition.read("sizes.json"))["clusters"]
        told = describe_clusters(partition)
        cards = []
        for member in self.experts:
            sheet = Image.open(partition.file(f"sheets/{member.cluster:02d}.png"))
            score = member.val_loss
            measured = (
                ""
                if score is None
                else f"<br>holdout error <b>{score.inside:.3f}</b>, outside its cluster "
                f"{'-' if score.outside is None else f'{score.outside:.3f}'}, a Gaussian's {score.gaussian:.3f}"
            )
            cards.append(
                f'<figure class="card" style="border-top-color:{expert_color(member.cluster)}">'
                f'<img src="{data_uri(sheet)}" alt="real samples of cluster {member.cluster}">'
                f"<figcaption><b>cluster {member.cluster}</b>, {sizes[member.cluster]['train']:,} training images"
                f"{''.join(f'<br>{escape(line)}' for line in told[member.cluster])}"
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
        chart = lines(curves, x=TIME_AXIS, y="right cluster, unseen samples", percent=True, falling=True)
        return f"<figure>{chart}</figure>"

    def curves(self) -> str:
        experts = {f"expert {m.cluster} ({m.objective.split(' ')[0]})": place_of(self.run, m) for m in self.experts}
        monolith = self.version.monolith
        places = experts | ({} if monolith is None else {"monolith": place_of(self.run, monolith)})
        colors = {name: expert_color(m.cluster) for name, m in zip(experts, self.experts, strict=True)}
        colors |= {"monolith": "#1f2933"}
        charts = []
        for key, label in (
            ("val_loss", "velocity error on the validation set"),
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
            chart = lines(curves, x="share of the budget", y=label, colors=colors, dashed=["monolith"], log=True)
            charts.append(f"<figure>{chart}</figure>")
        return f'<div class="charts">{"".join(charts)}</div>'

    def numbers(self) -> str:
        """Every score of every arm; where other extractors have looked, a table for each."""
        shown = self._numbers_by([p.arm for p in self._in_order()], self.evaluation["floors"]) + self.measured_by()
        for name, other in self.evaluation["extractors"].items():
            seen = [p.arm["extractors"][name] for p in self._in_order()]
            shown += f"<h3>By the features of {escape(name)}</h3>" + self._numbers_by(seen, other["floors"])
            directions = seen[0]["basis"]["directions"]
            if directions is not None:
                shown += f"<p>Distances in the {directions} directions in which real features vary most.</p>"
        return shown + self.explained()

    def _numbers_by(self, measured: Sequence[Mapping[str, Any]], floors: Mapping[str, Any]) -> str:
        """One row per arm and floor, one column per number of every score; one without a number is left out."""
        others = other_numbers(measured)
        rows = [
            [
                p.title,
                number_written("recognised", arm["recognised"], arm["intervals"].get("recognised")),
                number_written("frechet", arm["frechet"], arm["frechet_interval"]),
                number_written("nearest_median", arm["nearest_median"], arm["intervals"].get("nearest_median")),
                *(number_written(name, arm["scores"].get(name), arm["intervals"].get(name)) for name in others),
            ]
            for p, arm in zip(self._in_order(), measured, strict=True)
        ]
        accuracy, alone = floors["recogniser_accuracy"], floors["nearest_leave_one_out_median"]
        seen = any(cells[1] for cells in rows)
        halves = "" if accuracy is None or not seen else f"{accuracy:.1%} (unseen, 5-fold)"
        half, whole = floors["frechet_half_against_half"], floors["frechet_count_against_all"]
        real = [number_written(name, floors["scores"].get(name)) for name in others]
        floor_rows = [
            [
                "real: one half against the other",
                halves,
                number_written("frechet", half),
                f"{alone:.2f} (leave one out)",
                *real,
            ],
            [f"real: {self.evaluation['plan']['count']:,} against all", "", number_written("frechet", whole), ""]
            + [""] * len(others),
        ]
        head = ["arm", "recognised as asked", "Frechet distance", "nearest training image"]
        return table([*head, *map(number_title, others)], rows, floor_rows)

    def explained(self) -> str:
        """What every score says of itself."""
        told = [(name, (one.__doc__ or "").split("\n\n")[0].strip()) for name, one in SCORES.items()]
        lines_ = "".join(f"<li><b>{escape(number_title(name))}</b>: {escape(text)}</li>" for name, text in told if text)
        return f"<details><summary>What the columns are</summary><ul>{lines_}</ul></details>"

    def by_cluster(self) -> str:
        """How well each cluster's prompts are painted: its distance in every arm, and every other number below."""
        arms = [p for p in self._in_order() if p.arm["clusters"]]
        if not arms:
            return "<p>There are no prompts, and an image that nobody asked for belongs to no cluster.</p>"
        clusters = range(len(arms[0].arm["clusters"]))
        if all("too_few" in arms[0].arm["clusters"][k] for k in clusters):
            return f"<p>{self.evaluation['plan']['count']:,} images are too few to look at each cluster.</p>"
        rows = []
        for k in clusters:
            first = arms[0].arm["clusters"][k]
            found = [p.arm["clusters"][k] for p in arms]
            cells = ["too few" if "too_few" in one else number_written("frechet", one["frechet"]) for one in found]
            rows.append([f"cluster {k}", f"{first['samples']:,}", f"{first['real']:,}", *cells])
        shown = table(["", "painted", "real", *(p.title for p in arms)], rows)
        return shown + "".join(self._all_of_clusters(p) for p in arms)

    def _all_of_clusters(self, painted: Painted) -> str:
        """Every number of an arm, cluster by cluster, folded away."""
        found = painted.arm["clusters"]
        names = list(dict.fromkeys(name for row in found for name in row.get("scores", {})))
        rows = []
        for row in found:
            if "too_few" in row:
                rows.append([f"cluster {row['cluster']}", *[""] * (3 + len(names)), row["too_few"]])
                continue
            directions = row["frechet_directions"]
            ends = row["intervals"]
            cells = [number_written("recognised", row["recognised"], ends.get("recognised"))]
            cells += [number_written("frechet", row["frechet"]), "all" if directions is None else str(directions)]
            cells += [number_written(name, row["scores"].get(name), ends.get(name)) for name in names]
            rows.append([f"cluster {row['cluster']}", *cells, ""])
        head = ["", "recognised as asked", "Frechet distance", "in directions", *map(number_title, names), "too few"]
        return f"<details><summary>{escape(painted.title)}: every score</summary>{table(head, rows)}</details>"

    def measured_by(self) -> str:
        """In how many directions of the features distances are taken, where samples are fewer than features."""
        directions = self.evaluation.get("frechet_directions")
        if directions is None:
            return ""
        count = self.evaluation["plan"]["count"]
        return (
            f"<p>{count:,} samples are fewer than the features have numbers, so Frechet distances are taken in the "
            f"{directions} directions in which real features vary most. They compare on this page only.</p>"
        )

    def nearness(self) -> str:
        """What the distance to the nearest training image says about these very samples, good or bad."""
        floors = self.evaluation["floors"]
        real, floor = floors["nearest_leave_one_out_median"], floors["frechet_half_against_half"]
        sentences = [nearness_said(p.title, p.arm, real, floor) for p in self._in_order()]
        return "".join(f"<p>{escape(sentence)}</p>" for sentence in sentences if sentence)

    def verdict(self) -> str:
        table = self.evaluation["against_monolith"]
        if not table:
            return "<p>No monolith was trained: nothing here says how one network on all of the data would do.</p>"
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


def table(head: Sequence[str], rows: Sequence[Sequence[str]], floors: Sequence[Sequence[str]] = ()) -> str:
    """Rows of text below their heads, floors last; a column that is empty in every row is left out."""
    every = [*rows, *floors]
    kept = [column for column in range(len(head)) if any(cells[column] for cells in every)]
    shown = ["<tr>" + "".join(f"<th>{escape(head[column])}</th>" for column in kept) + "</tr>"]
    for place, cells in enumerate(every):
        mark = ' class="floor"' if place >= len(rows) else ""
        shown.append(f"<tr{mark}>" + "".join(f"<td>{escape(cells[column])}</td>" for column in kept) + "</tr>")
    return f'<div class="wide"><table>{"".join(shown)}</table></div>'


def nearness_said(title: str, arm: Mapping[str, Any], real: float, floor: float) -> str:
    """One sentence about an arm whose images lie nearer to training images, or farther, than real ones do; or nothing.

    Copies are near and good; so is, in most features, what is blurred, which lies near to everything and is bad.
    """
    near = arm["nearest_median"] / real if real > 0 else 1.0
    worse = arm["frechet"] / floor if floor > 0 else 1.0
    if near < NEAR and worse < MUCH_WORSE:
        return (
            f"{title}: its images lie {near:.2f} times as far from the nearest training image as real ones do, "
            "and are good by their Frechet distance: look for copies."
        )
    if near < NEAR:
        return (
            f"{title}: its images lie near to training images ({near:.2f} times as far as real ones), yet their "
            f"Frechet distance is {worse:,.0f} times the floor: more likely blurred than copied."
        )
    if near > FAR:
        return (
            f"{title}: its images lie {near:.1f} times as far from any training image as real ones do: not copies, "
            "and not like the data either."
        )
    return ""
