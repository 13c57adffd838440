"""Sample sheets of a training: there for people to look at, and in no digest."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from atoll.artifacts import Artifact
from atoll.islands.expert import load_expert
from atoll.islands.order import Order, read_order
from atoll.islands.sheets import Sheets
from atoll.islands.train import train
from atoll.training.compute import ComputeConfig
from atoll.training.resources import Resources
from runs import atoll
from tiny_orders import NETWORK, tiny_order, tiny_task

CPU = Resources(device="cpu")
NAMES = [f"{percent:03d}.png" for percent in range(10, 101, 10)]


@pytest.fixture(scope="module")
def order(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_order(tmp_path_factory.mktemp("run"), images=1280, samples=60, validation=8)


@pytest.fixture(scope="module")
def expert(order: Path, tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    """In a folder that held a sheet of a training that was thrown away, and something of the user's."""
    out = tmp_path_factory.mktemp("made") / "expert"
    (out / "sheets").mkdir(parents=True)
    (out / "sheets" / "010.png").write_bytes(b"of another order")
    (out / "sheets" / "holiday.png").write_bytes(b"not ours")
    made = train(order, out, resources=CPU)
    assert made is not None
    return made


def sheets_of(expert: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted((expert / "sheets").iterdir())}


def test_one_at_every_tenth_and_none_of_them_in_the_artifact(expert: Artifact) -> None:
    sheets = sheets_of(expert.store.path)
    assert sheets.pop("holiday.png") == b"not ours"
    assert list(sheets) == NAMES
    assert len(set(sheets.values())) == len(NAMES), "it has learned something in between"
    assert all(content.startswith(b"\x89PNG") for content in sheets.values())
    assert expert.names() == ["expert.json", "metrics.jsonl", "model.safetensors"]


def test_without_them_the_digest_is_the_same(order: Path, expert: Artifact, tmp_path: Path) -> None:
    atoll("train", order, "--out", tmp_path / "expert", "--device", "cpu", "--no-previews")
    assert Artifact.open(tmp_path / "expert").digest == expert.digest
    assert not (tmp_path / "expert" / "sheets").exists()


def test_they_show_the_averaged_weights(order: Path, expert: Artifact) -> None:
    """The last one is what the finished expert generates, and not what the weights of the last step would."""
    loaded, task = load_expert(expert.store), tiny_task(order)
    with torch.no_grad():
        images = Sheets.of(Path("nowhere"), task.samples).generate(loaded.network, task.card, ComputeConfig())
    assert images.shape == (16, 1, 8, 8), "two channels of latents and no map: the first one is shown"
    shown = np.asarray(Image.open(expert.store.path / "sheets" / "100.png").convert("L"))
    tile = 48
    for place, image in enumerate(images):
        top, left = (2 + part * (tile + 2) for part in divmod(place, 8))
        assert np.array_equal(shown[top : top + tile : 6, left : left + tile : 6], image[0])


def test_a_network_that_reads_nothing_and_a_map_of_three_colors(tmp_path: Path) -> None:
    network = replace(NETWORK, condition="none", classes=None)
    path = tiny_order(tmp_path, network=network, images=64, samples=5, validation=0)
    order, _ = read_order(path)
    preview = {"weights": [[0.5, 0.0], [0.0, 0.5], [0.1, 0.1]], "bias": [0.0, 0.0, 0.5]}
    latent = order.latent.model_dump(mode="json") | {"preview": preview}
    path.write_bytes(Order.model_validate({**order.model_dump(mode="json"), "latent": latent}).to_bytes())
    made = train(path, tmp_path / "expert", resources=CPU)
    assert made is not None
    assert list(sheets_of(tmp_path / "expert")) == ["050.png", "100.png"], "two steps are all its budget"
    sheet = np.asarray(Image.open(tmp_path / "expert" / "sheets" / "100.png"))
    assert (sheet[..., 0] != sheet[..., 1]).any(), "colors"


def test_small_micro_batches_are_kept_to(order: Path) -> None:
    task = tiny_task(order)
    sizes: list[int] = []
    task.network.register_forward_pre_hook(lambda module, inputs: sizes.append(len(inputs[0])))
    with torch.no_grad():
        Sheets.of(Path("nowhere"), task.samples).generate(task.network, task.card, ComputeConfig(micro_batch=8))
    assert set(sizes) == {8}, "four images, twice"
