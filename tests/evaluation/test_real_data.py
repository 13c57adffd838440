"""What generated images are compared with, where not every sample has a label."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from atoll.data.prepare import prepare
from atoll.evaluation.evaluate import RealData
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
