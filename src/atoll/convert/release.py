"""A whole model as a diffusers pipeline: in memory, as a folder, and back.

model_index.json                        the components, and under `atoll` what diffusers has no place for
README.md                               the model card
atoll_<digest>.py                       the code (bundle.py), at the root and again beside each component that needs it
expert_00/ ...                          config.json with the card and its digests; the expert's model.safetensors
router/ scheduler/ vae/ text_encoder/ tokenizer/

Reading it back runs none of the folder's code: JSON is validated, weights are checked as untrusted ones, and their
digests must be those that the experts had in their run.
"""

from __future__ import annotations

import copy
import shutil
from pathlib import Path
from typing import Any, TypeVar

import torch
from pydantic import BaseModel, ValidationError
from safetensors.torch import load_file
from torch import nn

from ..artifacts import Store, UserError, canonical_json, explain, sha256_bytes, verify_file
from ..data.space import LatentConfig
from ..islands.expert import ExpertCard
from ..models.autoencoders import TRANSFORMS, DiffusersKL, NetworkAutoencoder, load_autoencoder
from ..models.block_transform import BlockTransform
from ..models.pretrained import EXTRA, locate
from ..models.router import build_router
from ..models.text_encoders import load_pretrained_text
from ..registry.checks import check_spaces
from ..registry.versions import Version
from ..router.card import RouterCard, TrainedRouter
from ..runtime.load import Ensemble
from ..runtime.placing import OpenedExpert, Placed, Placement, SingleExpert
from ..runtime.weights import open_weights
from ..training.result import read_network
from .bundle import bundle, expert_names, load
from .checkpoint import read_json
from .export import new_folder
from .model_card import model_card

INDEX = "model_index.json"
WEIGHTS = "diffusion_pytorch_model.safetensors"
COPIED = ("*.json", "*.txt", "*.model", "*.safetensors")  # of a pretrained model's folder
Card = TypeVar("Card", bound=BaseModel)


def to_pipeline(model: Ensemble | SingleExpert, device: torch.device, run: Store | None = None) -> Any:
    """The model as a diffusers pipeline on `device`; the experts' weights are read again, in float32."""
    try:
        import diffusers
    except ImportError as error:
        raise UserError(f"--to diffusers: needs an extra: {EXTRA}") from error
    spaces, experts = spaces_of(model), model.placed.experts
    code: Any = load(bundle(len(experts)))
    components: dict[str, Any] = {"scheduler": code.AtollScheduler(), "router": None, "vae": None}
    components |= {"text_encoder": None, "tokenizer": None}
    components["vae"] = _autoencoder(spaces.latent, code, diffusers)
    if spaces.text is not None and spaces.text.kind != "words":
        encoder = load_pretrained_text(spaces.text.encoder)
        components |= {"text_encoder": _sharing(encoder.network), "tokenizer": encoder.tokenizer}
    for name, expert in zip(expert_names(len(experts)), experts, strict=True):
        file = expert.file
        verify_file(file.path, file.sha256)
        tensors = load_file(file.path)
        components[name] = _component(code.AtollExpert, expert.card, expert.digest, tensors, weights=file.sha256)
    settings = spaces.model_dump(mode="json", include={"latent", "text"}) | {"ensemble": None}
    if isinstance(model, Ensemble):
        if len(experts) != (clusters := model.version.clusters):
            raise UserError(f"--to diffusers: {len(experts)} of {clusters} clusters have an expert; admit the others")
        tensors = _sharing(model.router.network).state_dict()
        components["router"] = _component(code.AtollRouter, model.router.card, model.router.digest, tensors)
        settings["ensemble"] = model.version.model_dump(mode="json")
    settings["card"] = model_card(model, digest_of(model), run)
    return code.AtollPipeline(**components, atoll=settings).to(device)


def export_pipeline(model: Ensemble | SingleExpert, out: Path, run: Store | None = None) -> None:
    """Write the folder. Files of autoencoder and text encoder are copied as they are, so that they keep their ids."""
    with new_folder(out) as folder:
        pipeline = to_pipeline(model, torch.device("cpu"), run)
        pipeline.save_pretrained(folder)
        latent, text = spaces_of(model).latent, spaces_of(model).text
        if latent.autoencoder != "pixels" and latent.autoencoder not in TRANSFORMS:
            stock = pipeline.config["vae"][0] in ("diffusers", "transformers")
            _copy(locate(latent.autoencoder).folder, folder / "vae", COPIED if stock else ("*.safetensors",))
        if text is not None and text.kind != "words":
            _copy(load_pretrained_text(text.encoder).folder, folder / "text_encoder", COPIED)


def _copy(source: Path, target: Path, patterns: tuple[str, ...]) -> None:
    """Replace the weights that were written by the original files."""
    for written in target.glob("*.safetensors"):
        written.unlink()
    for file in (file for pattern in patterns for file in source.glob(pattern)):
        shutil.copyfile(file, target / file.name)


def _component(kind: Any, card: BaseModel, digest: str, tensors: dict[str, torch.Tensor], **config: Any) -> Any:
    """A network component with these weights; nothing is initialized to be overwritten."""
    with torch.device("meta"):
        made = kind(card=card.model_dump(mode="json"), digest=digest, **config)
    made.load_state_dict(tensors, strict=True, assign=True)
    return made.eval().requires_grad_(False)


def spaces_of(model: Ensemble | SingleExpert) -> Version | ExpertCard:
    """What names the model's latent and text space and its classes."""
    return model.version if isinstance(model, Ensemble) else model.card


def digest_of(model: Ensemble | SingleExpert) -> str:
    """Of the model as it was trained; an ensemble with another router than its file names is another model."""
    if not isinstance(model, Ensemble):
        return model.digest
    named, router, digest = model.version.router, model.router.digest, model.model_digest()
    own = named is not None and named.digest == router
    return digest if own else sha256_bytes(canonical_json([digest, router]))


def _autoencoder(latent: LatentConfig, code: Any, diffusers: Any) -> Any:
    """None for pixels, diffusers' own class where it has one."""
    found = load_autoencoder(latent.autoencoder)
    if not isinstance(found, NetworkAutoencoder):
        return None
    if isinstance(found.network, DiffusersKL):
        return _sharing(found.network.vae)
    tiny = found.network
    if isinstance(tiny, BlockTransform):
        return code.AtollBlockTransform(side=tiny.side).eval()
    if not tiny.pooled:
        return diffusers.AutoencoderTiny.from_pretrained(locate(latent.autoencoder).folder, local_files_only=True)
    made = code.AtollTinyAutoencoder(latent_channels=tiny.latent_channels, pooled=True)
    made.load_state_dict(tiny.state_dict())
    return made.eval().requires_grad_(False)


def _sharing(network: nn.Module) -> nn.Module:
    """Another module with the same tensors: moving one to a device leaves the other where it is."""
    known: dict[int, Any] = {id(p): nn.Parameter(p.data, requires_grad=False) for p in network.parameters()}
    known |= {id(b): b.data for b in network.buffers()}
    return copy.deepcopy(network, known)


def is_release(store: Store) -> bool:
    """Whether a diffusers pipeline lies there, ours or not."""
    return store.exists(INDEX)


def read_release(store: Store, placement: Placement = Placement()) -> Ensemble | SingleExpert:
    """Read a folder that `export_pipeline`, or such a pipeline's own `save_pretrained`, has written."""
    if not store.is_local:
        raise UserError(f"{store}: a diffusers folder is read from a disk; copy it there")
    folder = store.path
    index = read_json(folder / INDEX)
    settings = index.get("atoll")
    if not isinstance(settings, dict):
        raise UserError(f"{folder}: a diffusers pipeline that atoll did not write; load it with diffusers")
    found = {name for name in index if name.startswith("expert_")}
    names = expert_names(len(found))
    if not names or found != set(names):
        named = ", ".join(sorted(found))[:120]
        raise UserError(f"{folder}/{INDEX}: names the experts {named}; export the model again")
    for part in ("vae", "text_encoder"):
        if list((folder / part).glob("*.safetensors")):
            locate(str(folder / part))  # leaves a note: ids in the cards find their weights here
    experts = []
    for name in names:
        card, digest, weights = _read_config(folder / name, ExpertCard)
        file = open_weights(_weights(folder / name), weights, card.architecture)
        experts.append(OpenedExpert(card, digest, file))
    placed = Placed(experts, placement)
    record = settings.get("ensemble")
    if record is None:
        (expert,) = experts
        placed.read()
        return SingleExpert(expert, placed)
    version = _valid(Version, record, f"{folder}/{INDEX}: atoll.ensemble")
    router = _read_router(folder / "router", placement.device)
    clusters = {member.digest: member.cluster for member in version.serving}
    for k, (name, expert) in enumerate(zip(names, experts, strict=True)):
        if clusters.get(expert.digest) != k:
            raise UserError(f"{folder}/{name}: is not the expert of cluster {k} that {INDEX} names; export again")
        check_spaces(version, expert.card, f"{folder}/{name}")
    if {len(experts), router.card.architecture.clusters} != {version.clusters}:
        raise UserError(f"{folder}: does not fit the ensemble that {INDEX} names; export the model again")
    placed.read()
    return Ensemble(version, placed, router, missing={})


def _read_router(folder: Path, device: torch.device | str) -> TrainedRouter:
    """The router of a folder, with weights of the digest it was exported with."""
    card, digest, weights = _read_config(folder, RouterCard)
    verify_file(_weights(folder), weights)
    network = read_network(lambda: build_router(card.architecture), card.architecture.trunk, _weights(folder), device)
    return TrainedRouter(card, network, digest)


def _read_config(folder: Path, model: type[Card]) -> tuple[Card, str, str]:
    """Card, digest in the run, and digest of the weights."""
    settings = read_json(folder / "config.json")
    card = _valid(model, settings.get("card"), f"{folder}/config.json: card")
    digest, weights = settings.get("digest"), settings.get("weights")
    if not isinstance(digest, str) or not isinstance(weights, str):
        raise UserError(f"{folder}: its weights were changed after the export; load it with diffusers")
    return card, digest, weights


def _weights(folder: Path) -> Path:
    """The one file of weights of a component."""
    if not (folder / WEIGHTS).is_file():
        raise UserError(f"{folder}: holds no {WEIGHTS}; weights in several files or of a variant need diffusers")
    return folder / WEIGHTS


def _valid(model: type[Card], value: Any, where: str) -> Card:
    try:
        return model.model_validate_json(canonical_json(value))
    except (ValidationError, ValueError) as error:
        why = explain(error) if isinstance(error, ValidationError) else str(error)[:120]
        raise UserError(f"{where}: not valid ({why}); export the model again") from error
