"""What generated images are compared with, and the prompts they are generated for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from atoll.data.prepare import prepare
from atoll.evaluation.evaluate import against_monolith, write_npz
from atoll.evaluation.prompts import choose_prompts, spaced
from atoll.evaluation.real import RealData
from image_forms import CONFIG, folder, pictures


def test_samples_without_a_label_count_for_no_class(tmp_path: Path) -> None:
    items = pictures(60)
    items[0] = replace(items[0], caption="a red thing", label=None)  # others with this caption have a label
    items[1] = replace(items[1], caption="no class", label=None)
    data = prepare(folder(tmp_path / "source", items), tmp_path / "data", CONFIG)
    prompts, labels = choose_prompts(data, 16)
    assert prompts[:4] == ["a red thing", "a green thing", "a blue thing", "no class"]
    assert labels.tolist() == [0, 1, 2, -1] * 4
    real = RealData(data)
    images = torch.zeros(8, 3, 16, 16, dtype=torch.uint8)
    answer = int(real.real.classifier.predict(np.zeros((1, real.real.features.shape[1])))[0])
    found = real.measure(images, ["a", "b"] * 4, np.array([answer, -1] * 4))
    assert found["class_accuracy"].value == 1.0, "of images that can be right or wrong"
    assert "class_accuracy" not in real.measure(images, ["a", "b"] * 4, np.full(8, -1))
    assert {"fd", "kid", "precision", "recall", "diversity", "nearest"} <= found.keys()
    baseline = real.baseline()
    assert baseline["class_accuracy"].value < 0.8, "these pictures are noise, and the classifier has not seen them"
    assert baseline["fd"].value < 0.3 * found["fd"].value


@pytest.mark.parametrize(
    ("count", "chosen"),
    [
        (2, ["a", "d"]),  # fewer than classes: of some
        (4, ["a", "b", "d", "f"]),  # one of each
        (20, ["a", "b", "d", "f", "c"]),  # four images of each prompt
        (24, ["a", "b", "d", "f", "c", "e"]),  # what small classes lack goes to large ones
        (200, ["a", "b", "d", "f", "c", "e", "f1", "f2", "f3", "f4", "f5", "f6", "f7"]),  # all there are
    ],
)
def test_prompts_are_of_all_classes_and_of_each_the_same_number(tmp_path: Path, count: int, chosen: list[str]) -> None:
    classes = [["a"], ["b", "c"], ["d", "e"], ["f", *(f"f{n}" for n in range(1, 8))]]
    items = [
        replace(item, caption=caption, label=label)
        for item, (label, caption) in zip(
            pictures(13), [(k, c) for k, some in enumerate(classes) for c in some], strict=True
        )
    ]
    data = prepare(folder(tmp_path / "source", items), tmp_path / "data", CONFIG)
    assert list(dict.fromkeys(choose_prompts(data, count)[0])) == chosen


def test_captions_of_ones_own_are_all_asked_for(tmp_path: Path) -> None:
    items = [replace(item, caption=f"thing {n}", label=None) for n, item in enumerate(pictures(30))]
    data = prepare(folder(tmp_path / "source", items), tmp_path / "data", CONFIG)
    assert len(set(choose_prompts(data, 40)[0])) == 30
    assert spaced("abcdef", 3) == ["a", "c", "e"]
    real = RealData(data)
    assert real.real.classifier is None
    assert "class_accuracy" not in real.baseline()


def test_networks_that_read_labels_are_asked_for_class_numbers(tmp_path: Path) -> None:
    items = [replace(item, caption=None) for item in pictures(60)]
    items[0] = replace(items[0], label=None)
    data = prepare(folder(tmp_path / "a", items), tmp_path / "data", CONFIG)
    prompts, labels = choose_prompts(data, 12)
    assert prompts == ["0", "1", "2"] * 4
    assert labels.tolist() == [0, 1, 2] * 4
    manifest = data.manifest.model_copy(update={"config": {**data.config, "labels": None}})
    prompts, labels = choose_prompts(replace(data, manifest=manifest), 2)
    assert (prompts, labels.tolist()) == (["", ""], [-1, -1]), "networks that read nothing are asked for nothing"


def test_another_extractor_sees_what_the_latents_decode_to(tmp_path: Path) -> None:
    """Latents that are pixels give the very images back, and so the very features."""
    source = folder(tmp_path / "source", pictures(20))
    data = prepare(source, tmp_path / "data", CONFIG)
    config = CONFIG.model_copy(update={"features": "efficientnet-lite0"})
    own = RealData(prepare(source, tmp_path / "other", config))
    real = RealData(data, extractor="efficientnet-lite0", kept=tmp_path / "features")
    assert real.extractor == own.extractor == "efficientnet-lite0@128"
    torch.testing.assert_close(real.real.features, own.real.features, atol=1e-4, rtol=0)
    (kept,) = (tmp_path / "features").iterdir()
    save_file({"features": torch.zeros(20, 2)}, kept)
    again = RealData(data, extractor="efficientnet-lite0", kept=tmp_path / "features")
    assert torch.equal(again.real.features, torch.zeros(20, 2)), "what was seen once is kept"


def test_images_for_foreign_evaluators_are_what_they_read(tmp_path: Path) -> None:
    images = torch.arange(2 * 4 * 4, dtype=torch.uint8).view(2, 1, 4, 4)
    write_npz(images, tmp_path / "one.npz")
    read = np.load(tmp_path / "one.npz")["arr_0"]
    assert (read.shape, read.dtype) == ((2, 4, 4, 3), np.uint8)
    assert (read[1, :, :, 2] == images[1, 0].numpy()).all()


def test_the_first_route_of_the_plan_is_compared_with_the_monolith() -> None:
    def row(model: str, route: str | None, fd: float, router: str | None = None, guidance: float = 1.0) -> dict:
        sampling = {"route": route, "guidance": guidance}
        return {"model": model, "sampling": sampling, "scores": {"f": {"fd": {"value": fd}}}, "router": router}

    rows = [
        row("ensemble", "top-1", 30.0),
        row("ensemble", "top-2", 20.0),
        row("ensemble", "top-2", 5.0, router="router-blind"),
        row("ensemble", "top-2", 1.0, guidance=2.0),
        row("monolith", None, 25.0),
    ]
    expected = {"guidance": 1.0, "route": "top-1", "ensemble": 30.0, "monolith": 25.0, "ratio": 1.2}
    assert against_monolith(rows, "f") == [expected]
    assert against_monolith(rows[:-1], "f") == []
