"""README.md of a released model: what it is, who made it of what, and the lines of Python that run it.

Pure text out of plain facts. Some of them are words of strangers (licenses, origins): all of them are escaped here,
so that none becomes markup, a link or another line.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

LONGEST = 120  # characters of a stranger's words
# what the hub calls licenses it knows; others are "other", with their name
HUB_LICENSES = ("apache-2.0", "mit", "cc0-1.0", "cc-by-4.0", "cc-by-sa-4.0", "cc-by-nc-4.0", "cc-by-nc-sa-4.0")


def model_card(about: Mapping[str, Any]) -> str:
    """The whole card. `about` is JSON: see `about_model`."""
    sections = [
        front_matter(about),
        f"# {title(about)}",
        opening(about),
        snippet(about),
        section("Data", data_lines(about)),
        section("Experts", expert_table(about)),
        section("Router", router_lines(about)),
        section("Evaluation", evaluation_table(about)),
        section("Contributors", contributor_lines(about)),
        section("Licenses", license_lines(about)),
        section("Provenance", provenance_lines(about)),
    ]
    return "\n\n".join(filter(None, sections)) + "\n"


def section(name: str, lines: Sequence[str]) -> str:
    return "\n".join([f"## {name}", "", *lines]) if lines else ""


def one_line(words: object) -> str:
    """Somebody's words without control characters, and not too many."""
    line = " ".join("".join(c if c.isprintable() else " " for c in str(words)).split())
    return line if len(line) <= LONGEST else line[: LONGEST - 3] + "..."


def plain(words: object) -> str:
    """Somebody's words as text and nothing else: no Markdown, no HTML, no formula, no link."""
    escaped = "".join(f"\\{c}" if c in "\\`*_[]#|~$@:" else c for c in escape(one_line(words), quote=False))
    return escaped.replace("www.", "www\\.")  # a bare name becomes a link too


def licenses(about: Mapping[str, Any]) -> list[str]:
    """Every license named, of data, experts and router, once."""
    named = [about["data"].get("license"), *(expert["license"] for expert in about["experts"])]
    return sorted({str(license) for license in named if license})


def front_matter(about: Mapping[str, Any]) -> str:
    """For the hub: which library, which license. Strings are JSON, which is YAML that cannot be broken out of."""
    found = licenses(about)
    lines = ["library_name: diffusers", f"pipeline_tag: {about['task']}", "tags:", "- atoll"]
    if len(found) == 1 and found[0].lower() in HUB_LICENSES:
        lines.append(f"license: {found[0].lower()}")
    elif found:
        lines += ["license: other", f"license_name: {json.dumps(one_line(', '.join(found)))}"]
    return "\n".join(["---", *lines, "---"])


def title(about: Mapping[str, Any]) -> str:
    count, learned_of = len(about["experts"]), len(about["experts"][0].get("teachers") or ())
    if count > 1:
        return f"One diffusion model of {count} experts that never met"
    return f"One dense diffusion model of {learned_of} experts that never met" if learned_of else "One diffusion expert"


def opening(about: Mapping[str, Any]) -> str:
    size = " x ".join(str(side) for side in about["data"]["pixels"])
    if len(about["experts"]) == 1:
        learned = ", taught by experts of one cluster of the data each" if about["experts"][0].get("teachers") else ""
        return f"A diffusion transformer for images of {size} pixels, trained with Atoll{learned}."
    return (
        f"Each expert was trained alone on one cluster of the data. A router fuses them at every step. "
        f"Images of {size} pixels. Made with Atoll."
    )


def snippet(about: Mapping[str, Any]) -> str:
    """The lines that work, with the flag that the hub's own snippet leaves out."""
    route = f', route="{about["route"]}"' if about["route"] else ""
    guided = ", guidance_scale=2.0" if about["example"] is not None else ""
    prompt = "" if about["example"] is None else f"{json.dumps(about['example'])}, "
    call = f"pipe({prompt}num_images_per_prompt=4, generator=seeds, num_inference_steps=50{guided}{route})"
    lines = [
        "```python",
        "import torch",
        "from diffusers import DiffusionPipeline",
        "",
        'pipe = DiffusionPipeline.from_pretrained("FOLDER OR HUB ID", trust_remote_code=True)',
        "seeds = [torch.Generator().manual_seed(seed) for seed in range(4)]",
        f"images = {call}.images",
        "```",
        "",
        "It needs torch and diffusers" + (", and transformers for the text" if about["transformers"] else "") + ". "
        "`trust_remote_code` runs the `atoll_*.py` beside this file: the networks, the bridge between objectives and "
        "the router are not part of diffusers. With `atoll` installed, `atoll.load(FOLDER)` reads the same folder and "
        "runs none of its code.",
        "",
        "The scheduler is Atoll's (DPM-Solver++ 2M on equal steps of time); a stock one works as well: "
        "`pipe.scheduler = FlowMatchEulerDiscreteScheduler()`.",
    ]
    return "\n".join(lines)


def data_lines(about: Mapping[str, Any]) -> list[str]:
    data = about["data"]
    lines = []
    if data.get("images") is not None:
        source = f" from {plain(data['source'])}" if data.get("source") else ""
        lines.append(f"{data['images']:,} images{source}, license {plain(data.get('license') or 'not said')}.")
    lines.append(f"Latents of shape {data['latent']} by {plain(data['autoencoder'])}; text by {plain(data['text'])}.")
    if about.get("clusters"):
        sizes = ", ".join(f"{size:,}" for size in about["clusters"])
        lines += ["", f"{len(about['clusters'])} clusters; training images in each: {sizes}."]
    return lines


def expert_table(about: Mapping[str, Any]) -> list[str]:
    """One row per expert; the error is the validation loss on the holdout, next to that of a Gaussian."""
    lines = [
        "| expert | cluster | objective | parameters | images seen | error on unseen | a Gaussian's | started from |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, expert in zip(about["components"], about["experts"], strict=True):
        cluster = "all" if expert["cluster"] is None else expert["cluster"]
        inside, gaussian = (number(expert[key]) for key in ("inside", "gaussian"))
        started = plain(expert["origin"] or "random weights")
        lines.append(
            f"| `{name}` | {cluster} | {plain(expert['objective'])} | {expert['parameters']:,} | {expert['images']:,} "
            f"| {inside} | {gaussian} | {started} |"
        )
    return lines + teacher_lines(about)


def teacher_lines(about: Mapping[str, Any]) -> list[str]:
    """Whose answers an expert has learned, and their licenses."""
    lines = []
    for name, expert in zip(about["components"], about["experts"], strict=True):
        if expert.get("teachers"):
            lines += ["", f"`{name}` was distilled from experts of one cluster each:", ""]
        for teacher in expert.get("teachers") or ():
            license = plain(teacher["license"] or "not said")
            lines.append(f"- cluster {teacher['cluster']}: `{teacher['digest']}`, license {license}")
    return lines


def router_lines(about: Mapping[str, Any]) -> list[str]:
    router = about["router"]
    if router is None:
        return []
    sees = "the noisy image and the time" if router["blind"] else "the noisy image, the time and the prompt"
    lines = [f"{router['parameters']:,} parameters, {router['images']:,} images seen. It sees {sees}."]
    return [*lines, f"Default route: `{about['route']}`."]


def evaluation_table(about: Mapping[str, Any]) -> list[str]:
    evaluation = about.get("evaluation")
    if not evaluation:
        return []
    lines = [
        f"{evaluation['count']:,} samples each, features {plain(evaluation['features'])}.",
        "",
        "| route | guidance | steps | solver | Frechet distance | recognised |",
        "|---|---|---|---|---|---|",
    ]
    for arm in evaluation["arms"]:
        right = "" if arm["recognised"] is None else f"{arm['recognised']:.1%}"
        asked = f"{plain(arm['route'])} | {arm['guidance']:g} | {arm['steps']} | {plain(arm['solver'])}"
        lines.append(f"| {asked} | {number(arm['frechet'])} | {right} |")
    return lines


def contributor_lines(about: Mapping[str, Any]) -> list[str]:
    """Names as the organizer wrote them down."""
    named = [(name, expert["contributor"]) for name, expert in zip(about["components"], about["experts"], strict=True)]
    if not any(who for _, who in named):
        return []
    return [f"- `{name}`: {plain(who or 'not said')}" for name, who in named]


def license_lines(about: Mapping[str, Any]) -> list[str]:
    under: dict[str, list[str]] = {about["data"].get("license") or "not said": ["data"]}
    for name, expert in zip(about["components"], about["experts"], strict=True):
        under.setdefault(expert["license"] or "not said", []).append(f"`{name}`")
    lines = [f"- {plain(license)}: {', '.join(parts)}" for license, parts in under.items()]
    return [*lines, "- Apache-2.0: the code, `atoll_*.py`"]


def provenance_lines(about: Mapping[str, Any]) -> list[str]:
    lines = [f"Model `{about['digest']}`, written by atoll {plain(about['atoll'])}. Digests of the experts:", ""]
    return lines + [
        f"- `{name}`: `{expert['digest']}`" for name, expert in zip(about["components"], about["experts"], strict=True)
    ]


def number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"
