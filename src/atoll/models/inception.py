"""The Inception network of the standard FID: torch-fidelity's port of TensorFlow's, weights of 2015, resizing and all.

Nothing else gives numbers that compare with papers: other Inceptions, other weights or another resizing move them.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor

from ..artifacts import UserError
from .pretrained import fetched_file, files_digest, load_checkpoint

OPTION = "--features inception"
PACKAGE = "torch_fidelity"
FEATURES = "2048"  # the layer that FID, KID, precision and recall are taken of
AT_ONCE = 64  # images; each is 299 x 299 inside


class InceptionV3:
    """Images uint8 [B, C, S, S] to 2048 features. `name` is `inception`, `inception:FILE`, or an id."""

    def __init__(self, name: str, device: str) -> None:
        path = inception_weights(name)
        self.id = inception_id(name)

        def network(_weights: object) -> torch.nn.Module:  # read once for safety: torch-fidelity would load any pickle
            made: torch.nn.Module = network_of_fidelity().FeatureExtractorInceptionV3(
                "inception", [FEATURES], feature_extractor_weights_path=str(path)
            )
            return made

        self._network = load_checkpoint(OPTION, [path], network).eval().requires_grad_(False).to(device)

    @torch.no_grad()
    def extract(self, images: Tensor) -> Tensor:
        """By torch-fidelity's own forward pass, which takes the bytes as they are."""
        return torch.cat([self._network(part.expand(-1, 3, -1, -1))[0] for part in images.split(AT_ONCE)])


def inception_id(name: str) -> str:
    """The id of `inception` or `inception:FILE`: with the digest of its weights, which are fetched for that."""
    return f"inception@{files_digest([inception_weights(name)])}"


def inception_weights(name: str) -> Path:
    """The file a user names, or the official one: below $ATOLL_MODELS, in torch's cache, or fetched into it."""
    if given := name.partition(":")[2]:
        if not Path(given).is_file():
            raise UserError(f"--features {name}: no such file; give the weights, or `inception` to have them fetched")
        return Path(given)
    found, wanted = fetched_file(network_of_fidelity().URL_INCEPTION_V3, OPTION), name.partition("@")[2]
    if wanted and files_digest([found]) != wanted:
        raise UserError(f"{found}: is {files_digest([found])}, expected {name}; get the weights that were measured by")
    return found


def network_of_fidelity() -> ModuleType:
    """torch-fidelity's module of the network. The package as a whole wants torchvision, so an empty one stands in for
    it while the module is imported."""
    name = f"{PACKAGE}.feature_extractor_inceptionv3"
    if name in sys.modules or PACKAGE in sys.modules:
        return import_module(name)
    spec = find_spec(PACKAGE)
    if spec is None:
        raise UserError(f"{OPTION}: needs an extra: pip install 'atoll-diffusion[fidelity]'")
    package = ModuleType(PACKAGE)
    package.__path__ = list(spec.submodule_search_locations or ())
    sys.modules[PACKAGE] = package
    try:
        return import_module(name)
    finally:
        del sys.modules[PACKAGE]
