"""A whole model as a diffusers pipeline: in memory, as a folder, and back.

model_index.json                        the components, and under `atoll` what diffusers has no place for
README.md                               the model card
atoll_<digest>.py                       the code (bundle.py), at the root and again beside each component that needs it
expert_00/ ... router/                  config.json with the card and its digests, weights as safetensors
scheduler/ vae/ text_encoder/ tokenizer/

Reading it back runs none of the folder's code: JSON is validated, weights are checked like a stranger's, and their
digests must be those that the experts had in their run.
"""

from __future__ import annotations

import copy
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from pydantic import BaseModel, ValidationError
from torch import nn

from ..artifacts import Store, UserError, canonical_json, explain, sha256_bytes
from ..data.space import LatentSpace, TextSpace
from ..ensemble.file import EnsembleFile
from ..ensemble.load import Ensemble, check_spaces
from ..islands.expert import Expert, ExpertCard
from ..models.autoencoders import DiffusersKL, NetworkAutoencoder, Tiny, load_autoencoder
from ..models.dit import DiT, DiTConfig
from ..models.pretrained import EXTRA, locate
from ..models.router import Router
from ..models.text_encoders import load_pretrained_text
from ..process import LinearFlow
from ..router.card import RouterCard, TrainedRouter
from ..training.result import read_network, saved_digest
from .about import about_model
from .bundle import bundle, expert_names, load
from .checkpoint import read_json

INDEX = "model_index.json"
WEIGHTS = "diffusion_pytorch_model.safetensors"
PREFIX = "network."  # of the weights' names: a component holds a network of ours
COPIED = ("*.json", "*.txt", "*.model", "*.safetensors")  # of a pretrained model's folder
Card = TypeVar("Card", bound=BaseModel)


@dataclass(frozen=True)
class Release:
    """What a folder held."""

    body: Ensemble | Expert
    latent: LatentSpace
    text: TextSpace | None
    digest: str


def to_pipeline(
    body: Ensemble | Expert,
    latent: LatentSpace,
    text: TextSpace | None,
    digest: str,
    device: torch.device,
    run: Store | None = None,
) -> Any:
    """The model as a diffusers pipeline on `device`. Its networks share the memory of the model's weights."""
    library = _diffusers()
    experts = [body] if isinstance(body, Expert) else list(body.experts)
    code: Any = load(bundle(len(experts)))
    ensemble = body if isinstance(body, Ensemble) else None
    components: dict[str, Any] = {"scheduler": code.AtollScheduler(), "router": None}
    components["vae"] = _autoencoder(latent, code, library)
    components |= _text(text, code)
    for name, expert in zip(expert_names(len(experts)), experts, strict=True):
        components[name] = _component(code.AtollExpert, expert.card, expert.digest, expert.network)
    if ensemble is not None:
        router = ensemble.router
        components["router"] = _component(code.AtollRouter, router.card, router.digest, router.network)
    reference = LinearFlow() if ensemble is None else ensemble.file.reference
    spaces = {
        "latent": latent.model_dump(mode="json"),
        "text": None if text is None else text.model_dump(mode="json", exclude={"vocabulary"}),
        "reference": asdict(reference),
        "route": None if ensemble is None else ensemble.file.route,
        "ensemble": None if ensemble is None else ensemble.file.model_dump(mode="json"),
        "about": about_model(body, latent, text, digest, run),
    }
    return code.AtollPipeline(**components, atoll=spaces).to(device)


def export_pipeline(
    body: Ensemble | Expert,
    latent: LatentSpace,
    text: TextSpace | None,
    digest: str,
    out: Path,
    run: Store | None = None,
) -> None:
    """Write the folder. Files of autoencoder and text encoder are copied as they are, so that they keep their ids."""
    if out.exists():
        raise UserError(f"--out {out}: already exists; give a folder that does not")
    pipeline = to_pipeline(body, latent, text, digest, torch.device("cpu"), run)
    draft = out.with_name(f".{out.name}.partial")
    shutil.rmtree(draft, ignore_errors=True)
    try:
        pipeline.save_pretrained(draft)
        if latent.autoencoder != "pixels":
            ours = pipeline.config["vae"][0] not in ("diffusers", "transformers")
            _copy(locate(latent.autoencoder).folder, draft / "vae", ("*.safetensors",) if ours else COPIED)
        if text is not None and text.kind != "words":
            _copy(load_pretrained_text(text.encoder).folder, draft / "text_encoder", COPIED)
        os.replace(draft, out)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _copy(source: Path, target: Path, patterns: tuple[str, ...]) -> None:
    for written in target.glob("*.safetensors"):
        written.unlink()
    for pattern in patterns:
        for file in source.glob(pattern):
            shutil.copyfile(file, target / file.name)


def _component(kind: Any, card: BaseModel, digest: str, network: nn.Module) -> Any:
    """A component around a network's own tensors; nothing is initialised to be overwritten."""
    with torch.device("meta"):
        made = kind(card=card.model_dump(mode="json"), digest=digest)
    made.network.load_state_dict(network.state_dict(), strict=True, assign=True)
    return made.eval().requires_grad_(False)


def _autoencoder(latent: LatentSpace, code: Any, library: Any) -> Any:
    """None for pixels, diffusers' own class where it has one."""
    found = load_autoencoder(latent.autoencoder)
    if not isinstance(found, NetworkAutoencoder):
        return None
    if isinstance(found.network, DiffusersKL):
        return _sharing(found.network.vae)
    assert isinstance(found.network, Tiny)
    tiny = found.network.network
    if not tiny.pooled:
        return library.AutoencoderTiny.from_pretrained(locate(latent.autoencoder).folder, local_files_only=True)
    made = code.AtollTinyAutoencoder(latent_channels=tiny.latent_channels, pooled=True)
    made.load_state_dict(tiny.state_dict())
    return made.eval().requires_grad_(False)


def _text(text: TextSpace | None, code: Any) -> dict[str, Any]:
    if text is None:
        return {"text_encoder": None, "tokenizer": None}
    if text.kind == "words":
        return {"text_encoder": None, "tokenizer": code.AtollWords(list(text.vocabulary or ()), text.length)}
    found = load_pretrained_text(text.encoder)
    return {"text_encoder": _sharing(found.network), "tokenizer": found.tokenizer}


def _sharing(network: nn.Module) -> nn.Module:
    """Another module with the same tensors: moving one to a device leaves the other where it is."""
    known: dict[int, Any] = {id(p): nn.Parameter(p.data, requires_grad=False) for p in network.parameters()}
    known |= {id(b): b.data for b in network.buffers()}
    return copy.deepcopy(network, known)


def _diffusers() -> Any:
    try:
        import diffusers
    except ImportError as error:
        raise UserError(f"--to diffusers: needs an extra: {EXTRA}") from error
    return diffusers


def is_release(store: Store) -> bool:
    """Whether a diffusers pipeline lies there, ours or not."""
    return store.exists(INDEX)


def read_release(store: Store, device: torch.device | str) -> Release:
    """Read a folder that `export_pipeline`, or such a pipeline's own `save_pretrained`, has written."""
    if not store.is_local:
        raise UserError(f"{store}: a diffusers folder is read from a disk; copy it there")
    folder = store.path
    index = read_json(folder / INDEX)
    spaces = index.get("atoll")
    if not isinstance(spaces, dict):
        raise UserError(f"{folder}: a diffusers pipeline that atoll did not write; load it with diffusers")
    names = sorted(name for name in index if name.startswith("expert_"))
    if not names or names != expert_names(len(names)):
        raise UserError(f"{folder}/{INDEX}: names the experts {', '.join(names)[:120]}; export the model again")
    for part in ("vae", "text_encoder"):
        if list((folder / part).glob("*.safetensors")):
            locate(str(folder / part))  # leaves a note: ids in the cards find their weights here
    experts = [_read_expert(folder / name, device) for name in names]
    if spaces.get("ensemble") is None:
        (expert,) = experts
        return Release(expert, expert.card.latent, expert.card.text, expert.digest)
    file = _valid(EnsembleFile, spaces["ensemble"], f"{folder}/{INDEX}: atoll.ensemble")
    router = _read_router(folder / "router", device)
    known = {member.digest: member.cluster for member in file.experts}
    for k, expert in enumerate(experts):
        if known.get(expert.digest) != k:
            raise UserError(f"{folder}/{names[k]}: is not the expert of cluster {k} that {INDEX} names; export again")
        check_spaces(file, expert, f"{folder}/{names[k]}")
    if len(experts) != file.clusters or router.card.architecture.clusters != file.clusters:
        raise UserError(f"{folder}: {len(experts)} experts and a router for another number of clusters; export again")
    own = file.router is not None and file.router.digest == router.digest
    digest = file.model_digest() if own else sha256_bytes(canonical_json([file.model_digest(), router.digest]))
    return Release(Ensemble(file, experts, router), file.latent, file.text, digest)


def _read_expert(folder: Path, device: torch.device | str) -> Expert:
    settings = read_json(folder / "config.json")
    card = _valid(ExpertCard, settings.get("card"), f"{folder}/config.json: card")
    network = read_network(lambda: DiT(card.architecture), card.architecture, _weights(folder), device, PREFIX)
    return Expert(card, network, _digest(folder, settings, network))


def _read_router(folder: Path, device: torch.device | str) -> TrainedRouter:
    settings = read_json(folder / "config.json")
    card = _valid(RouterCard, settings.get("card"), f"{folder}/config.json: card")
    trunk: DiTConfig = card.architecture.trunk
    network = read_network(lambda: Router(card.architecture), trunk, _weights(folder), device, PREFIX)
    return TrainedRouter(card, network, _digest(folder, settings, network))


def _weights(folder: Path) -> Path:
    if not (folder / WEIGHTS).is_file():
        raise UserError(f"{folder}: holds no {WEIGHTS}; weights in several files or of a variant are diffusers' only")
    return folder / WEIGHTS


def _digest(folder: Path, settings: Mapping[str, Any], network: nn.Module) -> str:
    """The digest the config states, if the weights are those it belongs to."""
    digest, weights = settings.get("digest"), settings.get("weights")
    if not isinstance(digest, str) or weights != saved_digest(network.state_dict()):
        raise UserError(f"{folder}: its weights are not those it was exported with; export again, or use diffusers")
    return digest


def _valid(model: type[Card], value: Any, where: str) -> Card:
    try:
        return model.model_validate_json(canonical_json(value))
    except (ValidationError, ValueError) as error:
        why = explain(error) if isinstance(error, ValidationError) else str(error)[:120]
        raise UserError(f"{where}: not valid ({why}); export the model again") from error
