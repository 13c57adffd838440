"""Our formulas against torch-fidelity's own functions on the same features."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from atoll.artifacts import UserError
from atoll.evaluation.scores import SCORES, Estimate, Real, Sets, scored
from atoll.models import lpips

SETTINGS = {"verbose": False, "prc_neighborhood": 3, "prc_batch_size": 1000}
KERNEL = {"kid_kernel": "poly", "kid_kernel_poly_degree": 3, "kid_kernel_poly_gamma": None, "kid_kernel_poly_coef0": 1}


class Nothing(ModuleType):
    """In the place of torchvision, which torch-fidelity imports for its data sets: formulas have no use for it."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


@pytest.fixture
def fidelity(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, ModuleType]]:
    if not find_spec("torch_fidelity"):
        pytest.skip("needs torch-fidelity: NOT TESTED HERE")
    if not find_spec("torchvision"):
        stubs = [Nothing(f"torchvision{name}") for name in ("", ".datasets", ".transforms", ".transforms.functional")]
        stubs[2].functional = stubs[3]  # type: ignore[attr-defined]
        stubs[0].transforms = stubs[2]  # type: ignore[attr-defined]
        for stub in stubs:
            monkeypatch.setitem(sys.modules, stub.__name__, stub)
    before = set(sys.modules)
    yield {name: import_module(f"torch_fidelity.metric_{name}") for name in ("fid", "kid", "prc")}
    for name in set(sys.modules) - before:
        if name.startswith("torch_fidelity"):
            del sys.modules[name]


def number(name: str, ours: torch.Tensor, real: torch.Tensor) -> float:
    return scored(Sets(ours, Real(real, real, torch.full((len(real),), -1))))[name].value


def test_distances_precision_and_recall_are_torch_fidelitys(fidelity: dict[str, ModuleType]) -> None:
    numbers = torch.Generator().manual_seed(0)
    turn = torch.randn(24, 24, generator=numbers)
    ours = torch.randn(300, 24, generator=numbers) @ turn * 0.4 + 0.3
    real = torch.randn(260, 24, generator=numbers) @ turn * 0.5

    fid = fidelity["fid"]
    statistics = [fid.fid_features_to_statistics(features.double()) for features in (ours, real)]
    expected = fid.fid_statistics_to_metric(*statistics, False)["frechet_inception_distance"]
    assert number("fd", ours, real) == pytest.approx(expected, rel=1e-5)

    kid = fidelity["kid"]
    same = ours[:260].double().numpy(), real.double().numpy()  # its estimate takes sets of one size
    expected = kid.kernel_mmd(*same, **KERNEL, **SETTINGS)
    assert number("kid", ours[:260], real) == pytest.approx(expected, rel=1e-6)

    theirs = fidelity["prc"].prc_features_to_metric(ours, real, **SETTINGS)
    precision, recall = (number(name, ours, real) for name in ("precision", "recall"))
    assert (precision, recall) == pytest.approx((theirs["precision"], theirs["recall"]), abs=1e-6)
    assert 0.1 < recall != precision > 0.1, "or the test would not tell them apart"


def test_lpips_is_torch_fidelitys(
    fidelity: dict[str, ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With random weights of the right shapes: the real ones are a download."""
    theirs = import_module("torch_fidelity.sample_similarity_lpips")
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    wide = 3
    for channels in (64, 64, 0, 128, 128, 0, 256, 256, 256, 0, 512, 512, 512, 0, 512, 512, 512, 0):  # VGG16, 0: pool
        layers += [nn.MaxPool2d(2, 2)] if channels == 0 else [nn.Conv2d(wide, channels, 3, padding=1), nn.ReLU()]
        wide = channels or wide
    backbone = nn.ModuleDict({"features": nn.Sequential(*layers)})
    weighting = {f"lin{i}.model.1.weight": torch.rand(1, n, 1, 1) for i, n in enumerate((64, 128, 256, 512, 512))}
    monkeypatch.setattr(theirs, "torchvision_load_pretrained_vgg16", lambda: SimpleNamespace(features=layers))
    monkeypatch.setattr(theirs, "load_state_dict_from_url", lambda *_, **__: weighting)
    network = theirs.SampleSimilarityLPIPS("lpips-vgg16")

    monkeypatch.setenv("ATOLL_MODELS", str(tmp_path))
    (tmp_path / "lpips").mkdir()
    torch.save(backbone.state_dict(), tmp_path / "lpips" / lpips.BACKBONE.rpartition("/")[2])
    torch.save(weighting, tmp_path / lpips.WEIGHTING.rpartition("/")[2])
    ours = lpips.LPIPS("cpu", 32)
    images = torch.randint(0, 256, (5, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    images[3] = images[1]
    expected = network(images[[0, 1]], images[[2, 3]])
    assert expected[0] > 0.01
    torch.testing.assert_close(ours.distances(images[[0, 1]], images[[2, 3]]), expected, rtol=1e-4, atol=1e-6)

    apart = ours.within_groups(images, [7, 4, 7, 4, 4])
    torch.testing.assert_close(apart[:2], expected, rtol=1e-4, atol=1e-6)
    assert apart[2:].isnan().all(), "no image is in two pairs, and the last has no partner"
    real = Real(torch.zeros(5, 2), torch.zeros(5, 2), torch.zeros(5))
    sets = Sets(torch.zeros(5, 2), real, images, torch.tensor([7, 4, 7, 4, 4]), perceptual=ours)
    found = SCORES["lpips"].function(sets)
    assert isinstance(found, Estimate)
    assert found.value == pytest.approx(expected.mean().item(), rel=1e-4)
    assert SCORES["lpips"].function(replace(sets, groups=torch.arange(5))) is None
    assert SCORES["lpips"].function(replace(sets, perceptual=None)) is None

    torch.save({"a": os.system}, tmp_path / lpips.WEIGHTING.rpartition("/")[2])  # something that runs when it is read
    with pytest.raises(UserError, match=r"--lpips: .* are not its weights"):
        lpips.LPIPS("cpu", 32)


def test_lpips_sees_sixteen_pixels_and_refuses_fewer_before_it_fetches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    smallest = torch.zeros(1, 1, lpips.SMALLEST, lpips.SMALLEST)
    for _ in lpips.DEPTHS[1:]:
        smallest = nn.functional.max_pool2d(smallest, 2)
    assert smallest.numel() == 1
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.setattr(lpips, "BACKBONE", "http://127.0.0.1:9/vgg16-0123abcd.pth")
    with pytest.raises(UserError, match=r"^--lpips: these images have 8 pixels a side, it needs 16; leave it out$"):
        lpips.LPIPS("cpu", 8)


def test_lpips_weights_that_cannot_be_had_are_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.setattr(lpips, "BACKBONE", "http://127.0.0.1:9/vgg16-0123abcd.pth")
    with pytest.raises(UserError, match=r"^--lpips: its weights cannot be had .*vgg16-0123abcd.* ATOLL_MODELS names$"):
        lpips.weight_files()
