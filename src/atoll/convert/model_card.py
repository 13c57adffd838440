"""README.md of a released model: what it is, who made it of what, and the lines of Python that run it.

Licenses, origins and names may come from untrusted files. Every value is escaped as it enters the template, so that
none becomes markup, a link or another line.
"""

from __future__ import annotations

import json
from html import escape
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from .. import __version__
from ..artifacts import Store, UserError, find
from ..data.space import TextConfig
from ..islands.expert import ExpertCard
from ..models.accounting import account
from ..models.autoencoders import load_autoencoder
from ..registry.versions import place_of
from ..runtime.load import Ensemble
from ..runtime.placing import SingleExpert
from .bundle import expert_names

LONGEST = 120  # characters of an untrusted value
# what the hub calls licenses it has; others are "other", with their name
HUB_LICENSES = ("apache-2.0", "mit", "cc0-1.0", "cc-by-4.0", "cc-by-sa-4.0", "cc-by-nc-4.0", "cc-by-nc-sa-4.0")

TEMPLATE = """\
---
library_name: diffusers
pipeline_tag: {{ "text-to-image" if text else "unconditional-image-generation" }}
tags:
- atoll
{% if licenses|length == 1 and licenses[0]|lower in hub_licenses %}
license: {{ licenses[0]|lower }}
{% elif licenses %}
license: other
license_name: {{ licenses|join(", ")|one_line|tojson }}
{% endif %}
---

# One diffusion {{ "model of %d experts"|format(experts|length) if router else "expert" }}

{% if router %}
Each expert was trained alone on one cluster of the data. A router weights them at every sampling step.
{% endif %}
Images of {{ pixels|join(" x ") }} pixels. Made with Atoll.

```python
import torch
from diffusers import DiffusionPipeline

pipe = DiffusionPipeline.from_pretrained("FOLDER OR HUB ID", trust_remote_code=True)
seeds = [torch.Generator().manual_seed(seed) for seed in range(4)]
images = pipe(
{% if prompt is not none %}
    {{ prompt|tojson }},
    guidance_scale=2.0,
{% endif %}
{% if version %}
    route={{ version.route|tojson }},
{% endif %}
    num_images_per_prompt=4,
    generator=seeds,
    num_inference_steps=50,
).images
```

It needs torch and diffusers{{ ", and transformers for the text" if text and text.kind != "words" }}.
`trust_remote_code` runs the `atoll_*.py` of this folder: the networks, the conversion between objectives and the router
are not part of diffusers. With `atoll` installed, `atoll.load(FOLDER)` reads the same folder and runs none of its code.

The scheduler is Atoll's (DPM-Solver++ 2M on equal steps of time); a stock one works as well:
`pipe.scheduler = FlowMatchEulerDiscreteScheduler()`.

## Data

{% if data %}
{{ data.config.count|count }} images from {{ data.config.source.kind }}, license {{ license or "not stated" }}.
{% endif %}
Latents of shape {{ latent.shape|join(" x ") }} by {{ latent.autoencoder }}; text encoder: {{
text.encoder if text else "none" }}.
{% if sizes %}

{{ sizes|length }} clusters; training images in each: {{ sizes|map("count")|join(", ") }}.
{% endif %}

## Experts

| expert | cluster | objective | parameters | images seen | val loss | a Gaussian's | started from |
|---|---|---|---|---|---|---|---|
{% for e in experts %}
| {{ e.name|code }} | {{ "all" if e.card.cluster is none else e.card.cluster }} | {{ e.card.kind }} on {{
e.card.schedule.name }} | {{ e.parameters|count }} | {{ e.card.images|count }} | {{ e.val_loss.inside|number }} | {{
e.val_loss.gaussian|number }} | {{ e.card.origin or "random weights" }} |
{% endfor %}
{% for e in experts if e.card.teachers %}

{{ e.name|code }} was distilled from {% for teacher in e.card.teachers %}
expert {{ teacher.digest|code }} of cluster {{ teacher.cluster }} ({{ teacher.license or "license not stated" }}){{
", " if not loop.last }}{% endfor %}.
{% endfor %}
{% if router %}

## Router

{{ router_parameters|count }} parameters, {{ router.card.images|count }} images seen. It reads the noisy image{{
" and the time" if router.card.architecture.trunk.condition == "none" else ", the time and the prompt" }}.
Default route: {{ version.route|code }}.
{% endif %}
{% if evaluation %}

## Evaluation

{{ evaluation.plan.count|count }} samples each, features {{ evaluation.features[0] }}.

| route | guidance | steps | solver | FD | class accuracy |
|---|---|---|---|---|---|
{% for row in measured %}
| {{ row.sampling.route }} | {{ row.sampling.guidance|number }} | {{ row.sampling.steps }} | {{ row.sampling.solver
}} | {{ row.fd|number }} | {{ "" if row.class_accuracy is none else "%.1f%%"|format(100 * row.class_accuracy) }} |
{% endfor %}
{% endif %}

## Licenses and provenance

| part | license | contributor | digest |
|---|---|---|---|
| data | {{ license or "not stated" }} | | {{ version.data.digest|code if version }} |
{% for e in experts %}
| {{ e.name|code }} | {{ e.card.license or "not stated" }} | {{ e.contributor or "not stated" }} | {{ e.digest|code }} |
{% endfor %}
| the code, `atoll_*.py` | Apache-2.0 | Atoll {{ atoll }} | |
| the model | as its parts | | {{ digest|code }} |
"""


def model_card(model: Ensemble | SingleExpert, digest: str, run: Store | None = None) -> str:
    """The whole card, from the model and, where it is given, the run it comes from."""
    version = model.version if isinstance(model, Ensemble) else None
    first = model.placed.experts[0].card
    latent, text = (version or first).latent, (version or first).text
    members = {} if version is None else {member.digest: member for member in version.experts}
    experts = []
    for name, expert in zip(expert_names(len(model.placed.experts)), model.placed.experts, strict=True):
        member = members.get(expert.digest)
        experts.append(
            {
                "name": name,
                "card": expert.card,
                "digest": expert.digest,
                "parameters": account(expert.card.architecture).parameters,
                "val_loss": (member and member.val_loss) or {},
                "contributor": member and member.contributor,
            }
        )
    reduction = getattr(load_autoencoder(latent.autoencoder), "reduction", 1)
    facts: dict[str, Any] = {
        **dict.fromkeys(("data", "license", "sizes", "evaluation", "router")),
        "version": version,
        "experts": experts,
        "latent": latent,
        "pixels": [side * reduction for side in latent.shape[1:]],
        "text": text,
        "prompt": example(first, text),
        "digest": digest,
        "atoll": __version__,
    }
    if isinstance(model, Ensemble):
        facts["router"] = model.router
        facts["router_parameters"] = sum(p.numel() for p in model.router.network.parameters())
        facts |= {} if run is None else facts_of_run(run, model)
    named = {facts["license"], *(expert.card.license for expert in model.placed.experts)} - {None}
    return TEMPLATES.from_string(TEMPLATE).render(facts, licenses=sorted(named))


def example(card: ExpertCard, text: TextConfig | None) -> str | None:
    """A prompt that the model surely takes."""
    if text is not None:
        return " ".join((text.vocabulary or ())[: text.length]) if text.kind == "words" else "a photograph"
    return None if card.architecture.classes is None else "0"


def facts_of_run(run: Store, ensemble: Ensemble) -> dict[str, Any]:
    """What lies in the run: the data, the sizes of the clusters, and the evaluation of this very model."""
    facts: dict[str, Any] = {}
    if (partition := find(place_of(run, ensemble.version.partition))) is not None:
        facts["sizes"] = [size["train"] for size in json.loads(partition.read("clusters.json"))["clusters"]]
    if (data := find(place_of(run, ensemble.version.data))) is not None:
        facts |= {"data": data, "license": data.manifest.license}
    if not run.exists("evaluation.json"):
        return facts
    try:
        evaluation, own = json.loads(run.read("evaluation.json")), ensemble.model_digest()
        rows = [
            {name: value(row["scores"][evaluation["features"][0]], name) for name in ("fd", "class_accuracy")} | row
            for row in evaluation["configurations"]
            if (row["model"], row["digest"], row["router"]) == ("ensemble", own, None)
        ]
        samples = find(run.child("samples", str(rows[0]["folders"][0]))) if rows else None
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{run}/evaluation.json: not one that this atoll wrote ({type(error).__name__}); "
            f"`atoll evaluate {run}` again, or remove it"
        ) from error
    if samples is not None and (prompt := json.loads(samples.read("samples.json"))["prompts"][0]):
        facts["prompt"] = prompt
    return facts | ({"evaluation": evaluation, "measured": rows} if rows else {})


def value(scores: dict[str, Any], name: str) -> float | None:
    return float(scores[name]["value"]) if name in scores else None


def one_line(value: object) -> str:
    """A value without control characters, and not too long."""
    line = " ".join("".join(c if c.isprintable() else " " for c in str(value)).split())
    return line if len(line) <= LONGEST else line[: LONGEST - 3] + "..."


def as_text(value: object) -> str:
    """A value as text only: no Markdown, no HTML, no formula, no link. What a filter made Markup stays as it is."""
    if isinstance(value, Markup):
        return value
    escaped = "".join(f"\\{c}" if c in "\\`*_[]#|~$@:" else c for c in escape(one_line(value), quote=False))
    return escaped.replace("www.", "www\\.")  # a bare name becomes a link too


TEMPLATES = Environment(finalize=as_text, trim_blocks=True, keep_trailing_newline=True, undefined=StrictUndefined)
TEMPLATES.globals["hub_licenses"] = HUB_LICENSES
TEMPLATES.filters |= {
    "one_line": one_line,
    "count": "{:,}".format,
    "number": lambda value: f"{value:.4g}" if isinstance(value, int | float) else "",
    "code": lambda value: Markup("`" + one_line(value).replace("`", "'") + "`"),  # digests and names of ours
}
