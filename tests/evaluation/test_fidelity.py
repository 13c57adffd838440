"""Our formulas against torch-fidelity's own functions on the same features."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import pytest
import torch

from atoll.evaluation.metrics import frechet_distance
from atoll.evaluation.scores import SCORES, Sets

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


def test_distances_precision_and_recall_are_torch_fidelitys(fidelity: dict[str, ModuleType]) -> None:
    numbers = torch.Generator().manual_seed(0)
    turn = torch.randn(24, 24, generator=numbers)
    ours = torch.randn(300, 24, generator=numbers) @ turn * 0.4 + 0.3
    real = torch.randn(260, 24, generator=numbers) @ turn * 0.5

    fid = fidelity["fid"]
    statistics = [fid.fid_features_to_statistics(features.double()) for features in (ours, real)]
    expected = fid.fid_statistics_to_metric(*statistics, False)["frechet_inception_distance"]
    assert frechet_distance(ours.numpy(), real.numpy()) == pytest.approx(expected, rel=1e-8)

    kid = fidelity["kid"]
    same = ours[:260].double().numpy(), real.double().numpy()  # its estimate takes sets of one size
    expected = kid.kernel_mmd(*same, **KERNEL, **SETTINGS)
    assert SCORES["kernel"](Sets(ours[:260], real))["kernel"] == pytest.approx(expected, rel=1e-6)

    theirs = fidelity["prc"].prc_features_to_metric(ours, real, **SETTINGS)
    found = SCORES["manifold"](Sets(ours, real))
    assert (found["precision"], found["recall"]) == pytest.approx((theirs["precision"], theirs["recall"]), abs=1e-6)
    assert 0.1 < found["recall"] != found["precision"] > 0.1, "or the test would not tell them apart"
