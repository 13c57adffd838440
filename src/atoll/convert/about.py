"""What there is to say about a model: the facts of its card, as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from .. import __version__
from ..artifacts import Artifact, Store, UserError, find
from ..data.space import LatentConfig, TextConfig
from ..ensemble.load import Ensemble
from ..ensemble.placing import OpenedExpert, SingleExpert
from ..ensemble.versions import place_of
from ..islands.order import Order
from ..models.accounting import account
from ..models.autoencoders import load_autoencoder
from .bundle import expert_names


def about_model(
    model: Ensemble | SingleExpert, latent: LatentConfig, text: TextConfig | None, digest: str, run: Store | None = None
) -> dict[str, Any]:
    """The facts a model carries in itself and, with the run it comes from, those that lie there."""
    ensemble = model if isinstance(model, Ensemble) else None
    experts = model.placed.experts
    about: dict[str, Any] = {
        "atoll": __version__,
        "digest": digest,
        "components": expert_names(len(experts)),
        "experts": [about_expert(expert, ensemble) for expert in experts],
        "router": None,
        "route": None,
        "data": about_latents(latent, text),
        "example": example(experts[0], text),
        "task": "text-to-image" if text is not None else "unconditional-image-generation",
        "transformers": text is not None and text.kind != "words",
    }
    if ensemble is not None:
        card = ensemble.router.card
        about["route"] = ensemble.version.route
        about["router"] = {
            "parameters": sum(p.numel() for p in ensemble.router.network.parameters()),
            "images": card.images,
            "blind": card.architecture.trunk.condition == "none",
        }
        if run is not None:
            about = add_run(about, run, ensemble)
    return about


def about_expert(expert: OpenedExpert, ensemble: Ensemble | None) -> dict[str, Any]:
    card = expert.card
    members = {} if ensemble is None else {member.digest: member for member in ensemble.version.experts}
    measured = members[expert.digest].val_loss if expert.digest in members else None
    return {
        "digest": expert.digest,
        "order": card.order,
        "cluster": card.cluster,
        "objective": f"{card.kind} on {card.schedule.name}",
        "parameters": account(card.architecture).parameters,
        "images": card.images,
        "origin": card.origin,
        "license": card.license,
        "teachers": [teacher.model_dump(mode="json") for teacher in card.teachers],
        "contributor": None,
        "inside": None if measured is None else measured.inside,
        "gaussian": None if measured is None else measured.gaussian,
    }


def about_latents(latent: LatentConfig, text: TextConfig | None) -> dict[str, Any]:
    autoencoder = load_autoencoder(latent.autoencoder)
    height, width = latent.shape[1:]
    reduction = getattr(autoencoder, "reduction", 1)
    return {
        "latent": " x ".join(map(str, latent.shape)),
        "pixels": [height * reduction, width * reduction],
        "autoencoder": latent.autoencoder,
        "text": "nobody: there is none" if text is None else text.encoder,
    }


def example(expert: OpenedExpert, text: TextConfig | None) -> str | None:
    """A prompt for the snippet: one the model surely takes."""
    if text is not None:
        return " ".join((text.vocabulary or ())[: text.length]) if text.kind == "words" else "a photograph"
    return None if expert.card.architecture.classes is None else "0"


def add_run(about: dict[str, Any], run: Store, ensemble: Ensemble) -> dict[str, Any]:
    """Add what lies in the run: the data, the sizes of the clusters, who took which order, the evaluation."""
    version = ensemble.version
    if (partition := find(place_of(run, version.partition))) is not None:
        sizes = json.loads(partition.read("sizes.json"))["clusters"]
        about = {**about, "clusters": [size["train"] for size in sizes]}
    if (data := find(place_of(run, version.data))) is not None:
        facts = {"images": data.config["count"], "source": data.config["source"]["kind"]}
        about = {**about, "data": {**about["data"], **facts, "license": data.manifest.license}}
    takers = takers_of([orders for named in version.orders if (orders := find(place_of(run, named))) is not None])
    experts = [{**expert, "contributor": takers.get(expert["order"])} for expert in about["experts"]]
    return {**about, "experts": experts, **evaluated(run, ensemble)}


def takers_of(plans: Sequence[Artifact]) -> dict[str, str]:
    """Names of contributors by the digest of the order they took, as the organizer's plans have them."""
    takers = {}
    for plan in plans:
        by_cluster = {job["cluster"]: job["island"] for job in plan.config.get("islands", [])}
        for name in plan.names() if by_cluster else []:
            order = Order.model_validate_json(plan.read(name))
            if order.cluster in by_cluster:
                takers[order.digest()] = by_cluster[order.cluster]
    return takers


def evaluated(run: Store, ensemble: Ensemble) -> dict[str, Any]:
    """The arms of the run's evaluation that sampled this very model, and a prompt of theirs."""
    if not run.exists("evaluation.json"):
        return {}
    try:
        made = json.loads(run.read("evaluation.json"))
        own = ensemble.model_digest()
        arms = [a for a in made["arms"] if a["model"] == "ensemble" and a["digest"] == own and not a["router"]]
        kept = [
            {key: arm["sampling"][key] for key in ("route", "guidance", "steps", "solver")}
            | {key: arm[key] for key in ("frechet", "recognised")}
            for arm in arms
        ]
        facts = {"count": made["plan"]["count"], "features": made["features"], "arms": kept}
        folders = [str(arm["folder"]) for arm in arms]
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{run}/evaluation.json: not one that this atoll wrote ({type(error).__name__}); "
            f"`atoll evaluate {run}` again, or remove it"
        ) from error
    if not arms:
        return {}
    samples = find(run.child("samples", folders[0]))
    prompt = "" if samples is None else json.loads(samples.read("samples.json"))["prompts"][0]
    return {"evaluation": facts, **({"example": prompt} if prompt else {})}
