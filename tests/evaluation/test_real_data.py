"""What generated images are compared with, where not every sample has a label."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from atoll.artifacts import UserError
from atoll.data.index import Index
from atoll.data.prepare import prepare
from atoll.evaluation.evaluate import write_npz
from atoll.evaluation.metrics import frechet_distance
from atoll.evaluation.real import RealData, principal_axes, some_of_each
from atoll.evaluation.scores import SCORES, Sets
from atoll.evaluation.scores.estimate import Estimate
from atoll.models.feature_extractors import PixelFeatures
from atoll.partition.assignment import clusters_of
from atoll.partition.config import PartitionConfig
from atoll.partition.stage import partition
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
    assert real.prompts(2)[0] == ["a red thing", "a blue thing"], "fewer than there are come from all of them"
    assert real.classifier is not None
    # what nobody asked for can be neither right nor wrong
    images = torch.zeros(8, 3, 16, 16, dtype=torch.uint8)
    answer = int(real.classifier.model.predict(np.zeros((1, real.features.shape[1])))[0])  # type: ignore[attr-defined]
    assert real.measure(images, np.array([answer, -1] * 4))["recognised"] == 1.0
    assert real.measure(images, np.array([-1] * 8))["recognised"] is None


@pytest.mark.parametrize(
    ("count", "chosen"),
    [
        (2, ["a", "d"]),  # fewer than classes: of some
        (4, ["a", "b", "d", "f"]),  # one of each
        (20, ["a", "b", "d", "f", "f4"]),  # four images of each prompt; what small classes lack goes to large ones
        (200, ["a", "b", "c", "d", "e", "f", "f1", "f2", "f3", "f4", "f5", "f6", "f7"]),  # all there are
    ],
)
def test_a_class_with_many_captions_is_asked_for_by_some_of_them(count: int, chosen: list[str]) -> None:
    classes = [["a"], ["b", "c"], ["d", "e"], ["f", *(f"f{n}" for n in range(1, 8))]]
    assert some_of_each(classes, count) == chosen
    usual_first = [[*some[1:], some[0]] for some in classes]
    assert some_of_each(usual_first, 4) == ["a", "c", "e", "f1"], "the first of each, as the data has them"
    assert some_of_each(usual_first, 200) == some_of_each(classes, 200), "all are in one order"
    assert some_of_each([chosen], 2 * len(chosen)) == chosen, "captions of people's own are all asked for"


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
    assert real.classifier is None
    assert real.prompts(3)[1] is None
    with pytest.raises(UserError, match="-n 7: too few samples to measure by; paint 8 or more"):
        real.directions_for(7)  # of pixels, too


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
    assert {"kernel", "precision", "recall", "diversity", "nearest_median"} <= set(found["scores"])
    for name, (low, high) in found["intervals"].items():
        assert low <= found["scores"][name] <= high, name
    assert found["scores"].keys() - found["intervals"].keys() == {"nearest_median_real"}, "real images stay as they are"
    assert [real.directions_for(count) for count in (1000, 1280, 1281)] == [250, 320, None]
    with pytest.raises(UserError, match="-n 7: too few"):
        RealData(data, 1.0, count=7)


def test_clusters_are_scored_by_their_prompts_or_said_to_be_too_small(tmp_path: Path) -> None:
    items = pictures(60)  # red, green and blue things by turns
    data = prepare(folder(tmp_path / "source", items), tmp_path / "data", CONFIG)
    cut = partition(data.store, tmp_path / "partition", PartitionConfig(clusters=3, method="label"))
    real = RealData(data, 1.0, partition=cut)
    names = ["a red thing", "a green thing", "a blue thing"]
    prompts = [names[i % 2] for i in range(24)] + ["a blue thing"] * 4
    images = torch.randint(0, 256, (28, 3, 16, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    rows = {row["samples"]: row for row in real.measure(images, None, prompts)["clusters"] if row["samples"] == 4}
    assert rows[4]["too_few"] == "4 samples; 8 or more can be measured"
    assert "frechet" not in rows[4]
    index = Index.of(data)
    for row in real.measure(images, None, prompts)["clusters"]:
        if "too_few" in row:
            continue
        (name,) = {
            captions[0]
            for captions, k in zip(index.captions, clusters_of(index, cut).tolist(), strict=True)
            if k == row["cluster"]
        }
        ours = np.array([prompt == name for prompt in prompts])
        theirs = np.array([captions[0] == name for captions in index.captions])
        assert (row["samples"], row["real"], row["frechet_directions"]) == (ours.sum(), theirs.sum(), 3)
        features = PixelFeatures().extract(images[torch.from_numpy(ours)])
        alone = Sets(features, torch.from_numpy(real.features[theirs]))
        kernel = SCORES["kernel"](alone)["kernel"]
        assert row["scores"]["kernel"] == pytest.approx(kernel, rel=1e-6)
        assert isinstance(kernel, Estimate)
        assert row["intervals"]["kernel"] == pytest.approx([kernel.low, kernel.high], rel=1e-6)
        axes = principal_axes(real.features[theirs], 3)
        expected = frechet_distance(features.numpy() @ axes, real.features[theirs] @ axes)
        assert row["frechet"] == pytest.approx(expected, rel=1e-9)
    assert real.measure(images, None, [""] * 28)["clusters"] is None, "nobody asked for anything"


def test_another_extractor_sees_what_the_latents_decode_to(tmp_path: Path) -> None:
    """Latents that are pixels give the very images back, and so the very features."""
    source = folder(tmp_path / "source", pictures(20))
    data = prepare(source, tmp_path / "data", CONFIG)
    config = CONFIG.model_copy(update={"features": "efficientnet-lite0"})
    own = RealData(prepare(source, tmp_path / "other", config), 1.0)
    real = RealData(data, 1.0, extractor="efficientnet-lite0", kept=tmp_path / "features")
    assert real.extractor == own.extractor == "efficientnet-lite0@128"
    np.testing.assert_allclose(real.features, own.features, atol=1e-4)
    (kept,) = (tmp_path / "features").iterdir()
    save_file({"features": torch.from_numpy(own.features + 1.0)}, kept)
    again = RealData(data, 1.0, extractor="efficientnet-lite0", kept=tmp_path / "features")
    np.testing.assert_array_equal(again.features, own.features + 1.0, "what was seen once is kept")


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
