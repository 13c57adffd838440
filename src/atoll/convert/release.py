"""A whole model as a diffusers pipeline: in memory, as a folder, and back.

model_index.json                        the components, and under `atoll` what diffusers has no place for
README.md                               the model card
atoll_<digest>.py                       the code (bundle.py), at the root and again beside each component that needs it
expert_00/ ...                          config.json with the card and its digests; the expert's model.safetensors
router/ scheduler/ vae/ text_encoder/ tokenizer/

Reading it back runs none of the folder's code: JSON is validated, weights are checked like a stranger's, and their
digests must be those that the experts had in their run.
"""

from __future__ import annotations

import copy
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from pydantic import BaseModel, ValidationError
from safetensors.torch import load_file
from torch import nn

from ..artifacts import (
    Store,
    UserError,
    canonical_json,
    explain,
    sha256_bytes,
    verify_file,
)
from ..data.space import LatentConfig, TextConfig
from ..ensemble.checks import check_spaces
from ..ensemble.load import Ensemble
from ..ensemble.placing import OpenedExpert, Placed, Placement, SingleExpert
from ..ensemble.versions import Version
from ..ensemble.weights import open_weights
from ..islands.expert import ExpertCard
from ..models.autoencoders import TRANSFORMS, DiffusersKL, NetworkAutoencoder, Own, load_autoencoder
from ..models.block_transform import BlockTransform
from ..models.dit import DiTConfig
from ..models.pretrained import EXTRA, locate
from ..models.router import Router
from ..models.shapes import as_shapes
from ..models.text_encoders import load_pretrained_text
from ..process import LinearFlow
from ..router.card import RouterCard, TrainedRouter
from ..training.result import read_network, saved_digest
from .about import about_model
from .bundle import bundle, expert_names, load
from .checkpoint import read_json
from .export import new_folder

INDEX = "model_index.json"
WEIGHTS = "diffusion_pytorch_model.safetensors"
PREFIX = "network."  # of the names of a router's weights: the component holds a network of ours
COPIED = ("*.json", "*.txt", "*.model", "*.safetensors")  # of a pretrained model's folder
Card = TypeVar("Card", bound=BaseModel)


@dataclass(frozen=True)
class Release:
    """What a folder held."""

    model: Ensemble | SingleExpert
    latent: LatentConfig
    text: TextConfig | None
    digest: str


def to_pipeline(
    model: Ensemble | SingleExpert,
    latent: LatentConfig,
    text: TextConfig | None,
    device: torch.device,
    run: Store | None = None,
) -> Any:
    """The model as a diffusers pipeline on `device`; the experts' weights are read again, in float32."""
    library = _diffusers()
    experts = model.placed.experts
    code: Any = load(bundle(len(experts)))
    ensemble = model if isinstance(model, Ensemble) else None
    if ensemble is not None and len(experts) != (clusters := ensemble.router.card.architecture.clusters):
        raise UserError(f"--to diffusers: {len(experts)} of {clusters} clusters have an expert; admit the others first")
    components: dict[str, Any] = {"scheduler": code.AtollScheduler(), "router": None}
    components["vae"] = _autoencoder(latent, code, library)
    components |= _text(text, code)
    for name, expert in zip(expert_names(len(experts)), experts, strict=True):
        components[name] = _expert(code.AtollExpert, expert)
    if ensemble is not None:
        router = ensemble.router
        made = _as_shapes(code.AtollRouter, router.card, router.digest)
        made.network.load_state_dict(_sharing(router.network).state_dict(), strict=True, assign=True)
        components["router"] = made.eval().requires_grad_(False)
    reference = LinearFlow() if ensemble is None else ensemble.version.reference
    spaces = {
        "latent": latent.model_dump(mode="json"),
        "text": None if text is None else text.model_dump(mode="json", exclude={"vocabulary"}),
        "reference": asdict(reference),
        "route": None if ensemble is None else ensemble.version.route,
        "ensemble": None if ensemble is None else ensemble.version.model_dump(mode="json"),
        "about": about_model(model, latent, text, digest_of(model), run),
    }
    return code.AtollPipeline(**components, atoll=spaces).to(device)


def export_pipeline(
    model: Ensemble | SingleExpert, latent: LatentConfig, text: TextConfig | None, out: Path, run: Store | None = None
) -> None:
    """Write the folder. Files of autoencoder and text encoder are copied as they are, so that they keep their ids."""
    with new_folder(out) as folder:
        pipeline = to_pipeline(model, latent, text, torch.device("cpu"), run)
        pipeline.save_pretrained(folder)
        if latent.autoencoder != "pixels" and latent.autoencoder not in TRANSFORMS:
            ours = pipeline.config["vae"][0] not in ("diffusers", "transformers")
            _copy(locate(latent.autoencoder).folder, folder / "vae", ("*.safetensors",) if ours else COPIED)
        if text is not None and text.kind != "words":
            _copy(load_pretrained_text(text.encoder).folder, folder / "text_encoder", COPIED)


def _copy(source: Path, target: Path, patterns: tuple[str, ...]) -> None:
    for written in target.glob("*.safetensors"):
        written.unlink()
    for pattern in patterns:
        for file in source.glob(pattern):
            shutil.copyfile(file, target / file.name)


def _expert(kind: Any, expert: OpenedExpert) -> Any:
    file = expert.file
    made = _as_shapes(kind, expert.card, expert.digest, file.sha256)
    verify_file(file.path, file.sha256)
    made.load_state_dict(load_file(file.path), strict=True, assign=True)
    return made.eval().requires_grad_(False)


def _as_shapes(kind: Any, card: BaseModel, digest: str, weights: str | None = None) -> Any:
    """A component whose weights are to come: nothing is initialised to be overwritten."""
    with as_shapes():
        return kind(card=card.model_dump(mode="json"), digest=digest, weights=weights)


def digest_of(model: Ensemble | SingleExpert) -> str:
    """Of the model as it was trained; an ensemble with another router than its file names is another model."""
    if not isinstance(model, Ensemble):
        return model.digest
    named, router, digest = model.version.router, model.router.digest, model.model_digest()
    own = named is not None and named.digest == router
    return digest if own else sha256_bytes(canonical_json([digest, router]))


def _autoencoder(latent: LatentConfig, code: Any, library: Any) -> Any:
    """None for pixels, diffusers' own class where it has one."""
    found = load_autoencoder(latent.autoencoder)
    if not isinstance(found, NetworkAutoencoder):
        return None
    if isinstance(found.network, DiffusersKL):
        return _sharing(found.network.vae)
    assert isinstance(found.network, Own)
    tiny = found.network.network
    if isinstance(tiny, BlockTransform):
        return code.AtollBlockTransform(side=tiny.side).eval()
    if not tiny.pooled:
        return library.AutoencoderTiny.from_pretrained(locate(latent.autoencoder).folder, local_files_only=True)
    made = code.AtollTinyAutoencoder(latent_channels=tiny.latent_channels, pooled=True)
    made.load_state_dict(tiny.state_dict())
    return made.eval().requires_grad_(False)


def _text(text: TextConfig | None, code: Any) -> dict[str, Any]:
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


def read_release(store: Store, placement: Placement = Placement()) -> Release:
    """Read a folder that `export_pipeline`, or such a pipeline's own `save_pretrained`, has written."""
    if not store.is_local:
        raise UserError(f"{store}: a diffusers folder is read from a disk; copy it there")
    folder = store.path
    index = read_json(folder / INDEX)
    spaces = index.get("atoll")
    if not isinstance(spaces, dict):
        raise UserError(f"{folder}: a diffusers pipeline that atoll did not write; load it with diffusers")
    found = {name for name in index if name.startswith("expert_")}
    names = expert_names(len(found))
    if not names or found != set(names):
        named = ", ".join(sorted(found))[:120]
        raise UserError(f"{folder}/{INDEX}: names the experts {named}; export the model again")
    for part in ("vae", "text_encoder"):
        if list((folder / part).glob("*.safetensors")):
            locate(str(folder / part))  # leaves a note: ids in the cards find their weights here
    experts = [_open_expert(folder / name) for name in names]
    if spaces.get("ensemble") is None:
        (expert,) = experts
        alone = SingleExpert(expert, _placed(experts, placement))
        return Release(alone, expert.card.latent, expert.card.text, digest_of(alone))
    version = _valid(Version, spaces["ensemble"], f"{folder}/{INDEX}: atoll.ensemble")
    router = _read_router(folder / "router", placement.device)
    _check_members(version, experts, router, folder)
    ensemble = Ensemble(version, _placed(experts, placement), router, missing={})
    return Release(ensemble, version.latent, version.text, digest_of(ensemble))


def _placed(experts: Sequence[OpenedExpert], placement: Placement) -> Placed:
    placed = Placed(experts, placement)
    placed.read()
    return placed


def _check_members(version: Version, experts: Sequence[OpenedExpert], router: TrainedRouter, folder: Path) -> None:
    """The experts that lie there must be those that the ensemble names, one for each cluster."""
    clusters = {member.digest: member.cluster for member in version.serving}
    for k, (name, expert) in enumerate(zip(expert_names(len(experts)), experts, strict=True)):
        if clusters.get(expert.digest) != k:
            raise UserError(f"{folder}/{name}: is not the expert of cluster {k} that {INDEX} names; export again")
        check_spaces(version, expert.card, f"{folder}/{name}")
    if {len(experts), router.card.architecture.clusters} != {version.clusters}:
        raise UserError(f"{folder}: {len(experts)} experts, {version.clusters} clusters; export the model again")


def _open_expert(folder: Path) -> OpenedExpert:
    settings = read_json(folder / "config.json")
    card = _valid(ExpertCard, settings.get("card"), f"{folder}/config.json: card")
    digest, weights = settings.get("digest"), settings.get("weights")
    if not isinstance(digest, str) or not isinstance(weights, str):
        raise UserError(f"{folder}: its weights were changed after the export; load it with diffusers")
    return OpenedExpert(card, digest, open_weights(_weights(folder), weights, card.architecture))


def _read_router(folder: Path, device: torch.device | str) -> TrainedRouter:
    settings = read_json(folder / "config.json")
    card = _valid(RouterCard, settings.get("card"), f"{folder}/config.json: card")
    trunk: DiTConfig = card.architecture.trunk
    network = read_network(lambda: Router(card.architecture), trunk, _weights(folder), device, PREFIX)
    digest = settings.get("digest")
    if not isinstance(digest, str) or settings.get("weights") != saved_digest(network.state_dict()):
        raise UserError(f"{folder}: its weights are not those it was exported with; export the model again")
    return TrainedRouter(card, network, digest)


def _weights(folder: Path) -> Path:
    if not (folder / WEIGHTS).is_file():
        raise UserError(f"{folder}: holds no {WEIGHTS}; weights in several files or of a variant are diffusers' only")
    return folder / WEIGHTS


def _valid(model: type[Card], value: Any, where: str) -> Card:
    try:
        return model.model_validate_json(canonical_json(value))
    except (ValidationError, ValueError) as error:
        why = explain(error) if isinstance(error, ValidationError) else str(error)[:120]
        raise UserError(f"{where}: not valid ({why}); export the model again") from error
