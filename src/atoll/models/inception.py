"""The Inception network of the standard FID: torch-fidelity's port of TensorFlow's, weights of 2015, resizing and all.

Nothing else gives numbers that compare with papers: other Inceptions, other weights or another resizing move them.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from pickle import UnpicklingError
from types import ModuleType

import torch
from torch import Tensor

from ..artifacts import UserError, file_digest
from .pretrained import DIGEST_LENGTH, fetched_file

PACKAGE = "torch_fidelity"
NEEDS = "--features inception: needs an extra: pip install 'atoll-diffusion[fidelity]'"
FEATURES = "2048"  # the layer that FID, KID, precision and recall are taken of
AT_ONCE = 64  # images; each is 299 x 299 inside


class InceptionV3:
    """Images uint8 [B, C, S, S] to 2048 features. `name` is `inception`, `inception:FILE`, or an id."""

    def __init__(self, name: str, device: str) -> None:
        path = inception_weights(name)
        self.id = weights_id(path)
        try:
            torch.load(path, map_location="cpu", weights_only=True)  # for torch-fidelity would load whatever it holds
            network = network_of_fidelity().FeatureExtractorInceptionV3(
                "inception", [FEATURES], feature_extractor_weights_path=str(path)
            )
        except (UnpicklingError, RuntimeError, AttributeError, TypeError, KeyError) as error:
            first = str(error).strip().splitlines()[0]
            raise UserError(f"--features inception: {path} holds no such network ({first[:100]})") from error
        self._network = network.eval().requires_grad_(False).to(device)

    @torch.no_grad()
    def extract(self, images: Tensor) -> Tensor:
        """By torch-fidelity's own forward pass, which takes the bytes as they are."""
        return torch.cat([self._network(part.expand(-1, 3, -1, -1))[0] for part in images.split(AT_ONCE)])


def inception_id(name: str) -> str:
    """The id of `inception` or `inception:FILE`: with the digest of its weights, which are fetched for that."""
    return weights_id(inception_weights(name))


def weights_id(path: Path) -> str:
    return f"inception@{file_digest(path)[:DIGEST_LENGTH]}"


def inception_weights(name: str) -> Path:
    """The file a user names, or the official one: below $ATOLL_MODELS, in torch's cache, or fetched into it."""
    if not find_spec(PACKAGE):
        raise UserError(NEEDS)
    if given := name.partition(":")[2]:
        if not Path(given).is_file():
            raise UserError(f"--features {name}: no such file; give the weights, or `inception` to have them fetched")
        return Path(given)
    found = fetched_file(network_of_fidelity().URL_INCEPTION_V3, "--features inception")
    wanted = name.partition("@")[2]
    if wanted and not weights_id(found).endswith(wanted):
        raise UserError(f"{found}: is {weights_id(found)}, expected {name}; get the weights that were measured by")
    return found


def network_of_fidelity() -> ModuleType:
    """torch-fidelity's module of the network, by itself: the package as a whole wants torchvision, which this does not.

    The package is stood in for while its module is imported, and not longer.
    """
    name = f"{PACKAGE}.feature_extractor_inceptionv3"
    if name in sys.modules or PACKAGE in sys.modules:
        return import_module(name)
    spec = find_spec(PACKAGE)
    if spec is None:
        raise UserError(NEEDS)
    package = ModuleType(PACKAGE)
    package.__path__ = list(spec.submodule_search_locations or ())
    sys.modules[PACKAGE] = package
    try:
        return import_module(name)
    finally:
        del sys.modules[PACKAGE]
