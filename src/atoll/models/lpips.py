"""LPIPS (Zhang et al., 2018), the distance of two images as VGG16 sees them, as torch-fidelity computes it.

At five depths the activations are brought to length 1 at every place, their squared differences are weighted channel by
channel and averaged over places; LPIPS is the sum of the five. torch-fidelity's own needs torchvision for VGG16, of
which it takes the weights only: this reads them without.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..artifacts import UserError
from .pretrained import fetched_file, files_digest, load_checkpoint

OPTION = "--lpips"
BACKBONE = "https://download.pytorch.org/models/vgg16-397923af.pth"  # its name has the first digits of its sha256
WEIGHTING = "https://github.com/toshas/torch-fidelity/releases/download/v0.2.0/weights-vgg16-lpips.pth"
DEPTHS = ((0, 2), (5, 7), (10, 12, 14), (17, 19, 21), (24, 26, 28))  # convolutions by their numbers in torchvision
SHIFT, SCALE = (-0.030, -0.088, -0.188), (0.458, 0.448, 0.450)  # of pixels in [-1, 1]
SMALLEST = 2 ** (len(DEPTHS) - 1)  # pixels a side, of which the last depth sees one
AT_ONCE = 64  # pairs of images

Convolution = tuple[Tensor, Tensor]  # weight and bias


class LPIPS:
    """Distances of pairs of images uint8 [B, C, S, S]; `id` has the digest of both files of weights."""

    def __init__(self, device: str, side: int) -> None:
        """For images of `side` pixels; too small ones are refused before anything is fetched."""
        if side < SMALLEST:
            raise UserError(f"{OPTION}: these images have {side} pixels a side, it needs {SMALLEST}; leave it out")
        files = weight_files()
        self.id, self._device = f"lpips-vgg16@{files_digest(files)}", device
        self._convolutions, self._weighting = load_checkpoint(OPTION, files, parts, device)

    @torch.no_grad()
    def distances(self, a: Tensor, b: Tensor) -> Tensor:
        """LPIPS of each image of a to the one of b in its place, float32 [B]."""
        total = torch.zeros(len(a), device=self._device)
        seen = zip(self._depths(a.to(self._device)), self._depths(b.to(self._device)), self._weighting, strict=True)
        for one, other, weights in seen:
            total += F.conv2d((one - other).square(), weights).mean(dim=(1, 2, 3))
        return total

    def within_groups(self, images: Any, groups: Sequence[int]) -> Tensor:
        """LPIPS from an image to the next of its group, float32 [N] on the CPU; nan where none is left for it.

        `images` give uint8 [C, S, S] by number, wherever they lie. No image is in two pairs.
        """
        pairs, apart = list(disjoint_pairs(groups)), torch.full((len(groups),), torch.nan)
        for start in range(0, len(pairs), AT_ONCE):
            some = pairs[start : start + AT_ONCE]
            first, second = (torch.stack([images[pair[side]] for pair in some]) for side in (0, 1))
            apart[[pair[0] for pair in some]] = self.distances(first, second).cpu()
        return apart

    def _depths(self, images: Tensor) -> Iterator[Tensor]:
        """Activations of unit length [B, C, s, s] at each depth."""
        shift, scale = (torch.tensor(some, device=self._device).view(1, 3, 1, 1) for some in (SHIFT, SCALE))
        x = (images.expand(-1, 3, -1, -1).float() / 127.5 - 1.0 - shift) / scale
        for depth, convolutions in enumerate(self._convolutions):
            x = x if depth == 0 else F.max_pool2d(x, 2)
            for weight, bias in convolutions:
                x = F.conv2d(x, weight, bias, padding=1).relu()
            yield x / (x.square().sum(1, keepdim=True).sqrt() + 1e-10)


def parts(backbone: dict[str, Tensor], weighting: dict[str, Tensor]) -> tuple[list[list[Convolution]], list[Tensor]]:
    """The convolutions at each depth, and the weights of its channels."""
    kinds = ("weight", "bias")
    convolutions = [[tuple(backbone[f"features.{n}.{kind}"].float() for kind in kinds) for n in d] for d in DEPTHS]
    channels = [weighting[f"lin{depth}.model.1.weight"].float() for depth in range(len(DEPTHS))]
    return convolutions, channels  # type: ignore[return-value]


def disjoint_pairs(groups: Sequence[int]) -> Iterator[tuple[int, int]]:
    """The first two of each group, the third and the fourth, and so on."""
    waiting: dict[int, int] = {}
    for place, group in enumerate(groups):
        if group in waiting:
            yield waiting.pop(group), place
        else:
            waiting[group] = place


def weight_files() -> tuple[Path, Path]:
    """VGG16's weights and LPIPS's own: below $ATOLL_MODELS, in torch's cache, or fetched into it."""
    return fetched_file(BACKBONE, OPTION), fetched_file(WEIGHTING, OPTION)
