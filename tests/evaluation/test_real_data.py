"""What generated images are compared with, where not every sample has a label."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from atoll.artifacts import UserError
from atoll.data.prepare import prepare
from atoll.evaluation.evaluate import RealData, principal_axes, write_npz
from image_forms import CONFIG, folder, pictures


def test_samples_without_a_label_do_not_end_recognition(tmp_path: Path) -> None:
    items = pictures(60)
    items[0] = replace(items[0], caption="a red thing", label=None)  # others with this caption have a label
    items[1] = replace(items[1], caption="nobody knows", label=None)
    real = RealData(prepare(folder(tmp_path / "source", items), tmp_path / "data", CONFIG), 1.0)
    prompts, wanted = real.prompts(8)
    assert prompts[:4] == ["a red thing", "a green thing", "a blue thing", "nobody knows"]
    assert wanted is not None
    assert wanted.tolist() == [0, 1, 2, -1] * 2
    assert real.recogniser is not None
    # what nobody asked for can be neither right nor wrong
    images = torch.zeros(8, 3, 16, 16, dtype=torch.uint8)
    answer = int(real.recogniser.model.predict(np.zeros((1, real.features.shape[1])))[0])  # type: ignore[attr-defined]
    assert real.measure(images, np.array([answer, -1] * 4))["recognised"] == 1.0
    assert real.measure(images, np.array([-1] * 8))["recognised"] is None


def test_networks_that_read_labels_are_asked_for_class_numbers(tmp_path: Path) -> None:
    items = [replace(item, caption=None) for item in pictures(60)]
    items[0] = replace(items[0], label=None)
    prompts, wanted = RealData(prepare(folder(tmp_path / "a", items), tmp_path / "data", CONFIG), 1.0).prompts(4)
    assert prompts == ["0", "1", "2", "0"]
    assert wanted is not None
    assert wanted.tolist() == [0, 1, 2, 0]


def test_data_with_few_labels_has_nothing_to_recognise(tmp_path: Path) -> None:
    items = [replace(item, label=None) for item in pictures(40)]
    items[0] = replace(items[0], label=4)
    real = RealData(prepare(folder(tmp_path / "a", items), tmp_path / "data", CONFIG), 1.0)
    assert real.recogniser is None
    assert real.prompts(3)[1] is None


def test_networks_that_read_nothing_are_asked_for_nothing(tmp_path: Path) -> None:
    """Data once lost its labels when one was missing: its index has them, and its networks do not."""
    data = prepare(
        folder(tmp_path / "a", [replace(item, caption=None) for item in pictures(40)]), tmp_path / "data", CONFIG
    )
    manifest = data.manifest.model_copy(update={"config": {**data.config, "labels": None}})
    assert RealData(replace(data, manifest=manifest), 1.0).prompts(2) == (["", ""], None)


def test_every_score_is_measured_in_as_many_directions_as_samples_tell(tmp_path: Path) -> None:
    config = CONFIG.model_copy(update={"features": "efficientnet-lite0"})
    data = prepare(folder(tmp_path / "source", pictures(60)), tmp_path / "data", config)
    real = RealData(data, 1.0, count=12)
    assert real.directions == 3
    images = torch.randint(0, 256, (12, 3, 16, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    found = real.measure(images, None, ["a", "b", "c"] * 4)
    low, high = found["frechet_interval"]
    assert low < found["frechet"] < high
    assert {"kernel", "precision", "recall", "diversity"} <= set(found["scores"])
    assert [real.directions_for(count) for count in (1000, 1280, 1281)] == [250, 320, None]
    with pytest.raises(UserError, match="-n 4: too few"):
        RealData(data, 1.0, count=4)


def test_principal_axes_are_those_of_the_singular_values() -> None:
    features = np.random.default_rng(0).normal(size=(50, 6)) * np.array([1, 9, 3, 7, 2, 5])
    axes = principal_axes(features, 3)
    _, _, rows = np.linalg.svd(features - features.mean(0))
    assert np.abs(np.abs(rows[:3] @ axes) - np.eye(3)).max() < 1e-9


def test_images_for_foreign_evaluators_are_what_they_read(tmp_path: Path) -> None:
    images = torch.arange(2 * 4 * 4, dtype=torch.uint8).view(2, 1, 4, 4)
    write_npz(images, tmp_path / "arm.npz")
    read = np.load(tmp_path / "arm.npz")["arr_0"]
    assert (read.shape, read.dtype) == ((2, 4, 4, 3), np.uint8)
    assert (read[1, :, :, 2] == images[1, 0].numpy()).all()
