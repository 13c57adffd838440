"""Sample sheets of a training: there for people to look at, and nothing else knows of them."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from atoll.artifacts import Artifact, find
from atoll.islands.expert import load_expert
from atoll.islands.order import Order, read_order
from atoll.islands.sheets import Sheets
from atoll.islands.train import train
from atoll.training.execution import Execution
from atoll.training.resources import Resources
from runs import ATOLL, atoll
from tiny_orders import LATENT, NETWORK, tiny_learner, tiny_order

CPU = Resources(device="cpu")
NAMES = [f"{percent:03d}.png" for percent in range(10, 101, 10)]


@pytest.fixture(scope="module")
def order(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_order(tmp_path_factory.mktemp("run"), images=1280, samples=60, validation=8)


@pytest.fixture(scope="module")
def watched(order: Path, tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    made = train(order, tmp_path_factory.mktemp("watched") / "expert", resources=CPU)
    assert made is not None
    return made


def sheets_of(expert: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted((expert / "sheets").iterdir())}


def test_one_at_every_tenth_and_none_of_them_in_the_artifact(watched: Artifact) -> None:
    sheets = sheets_of(watched.store.path)
    assert list(sheets) == NAMES
    assert len(set(sheets.values())) == len(NAMES), "it has learned something in between"
    assert watched.names() == ["expert.json", "metrics.jsonl", "model.safetensors"]


def test_they_change_nothing_that_is_learned(order: Path, watched: Artifact, tmp_path: Path) -> None:
    """The same weights to the bit, and so the same digest."""
    without = train(order, tmp_path / "expert", resources=CPU, sheets=False)
    assert without is not None
    assert without.digest == watched.digest
    assert not (tmp_path / "expert" / "sheets").exists()


def test_they_show_the_averaged_weights(order: Path, watched: Artifact) -> None:
    """The last one is what the finished expert paints, and not what the weights of the last step would."""
    expert, learner = load_expert(watched.store), tiny_learner(order)
    sheets = Sheets(Path("nowhere"), replace(learner, network=expert.network), learner.samples)  # type: ignore[arg-type]
    with torch.no_grad():
        painted = sheets.paint(Execution())
    assert painted.shape == (16, 1, 8, 8), "two channels of latents and no map: the first one is shown"
    shown = np.asarray(Image.open(watched.store.path / "sheets" / "100.png").convert("L"))
    tile = 48
    for place, image in enumerate(painted):
        top, left = (2 + part * (tile + 2) for part in divmod(place, 8))
        assert np.array_equal(shown[top : top + tile : 6, left : left + tile : 6], image[0])


def test_killed_and_run_again_it_leaves_the_same_sheets(order: Path, watched: Artifact, tmp_path: Path) -> None:
    out = tmp_path / "expert"
    command = [
        *ATOLL,
        "train",
        str(order),
        "--out",
        str(out),
        "--quiet",
        "--device",
        "cpu",
        "--checkpoint-seconds",
        "0",
    ]
    process = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"})
    while process.poll() is None and not (out / "sheets" / "040.png").exists():
        time.sleep(0.002)
    process.kill()
    assert process.wait() == -signal.SIGKILL, "it ended before it could be killed"
    assert find(out) is None
    assert train(order, out, resources=CPU).digest == watched.digest  # type: ignore[union-attr]
    assert sheets_of(out) == sheets_of(watched.store.path)


def test_sheets_of_a_training_that_was_thrown_away_are_painted_anew(
    order: Path, watched: Artifact, tmp_path: Path
) -> None:
    folder = tmp_path / "expert" / "sheets"
    folder.mkdir(parents=True)
    (folder / "010.png").write_bytes(b"of another order")
    (folder / "holiday.png").write_bytes(b"not ours")
    train(order, tmp_path / "expert", resources=CPU)
    found = sheets_of(tmp_path / "expert")
    assert found.pop("holiday.png") == b"not ours"
    assert found == sheets_of(watched.store.path)


def test_a_contributor_may_switch_them_off(order: Path, watched: Artifact, tmp_path: Path) -> None:
    atoll("train", order, "--out", tmp_path / "expert", "--device", "cpu", "--no-previews")
    assert Artifact.open(tmp_path / "expert").digest == watched.digest
    assert not (tmp_path / "expert" / "sheets").exists()


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
    assert load_expert(made.store).card.latent.preview is not None, "whoever paints with it later has the map"


def test_a_few_samples_make_a_small_sheet_and_small_micro_batches_are_kept_to(order: Path) -> None:
    learner = tiny_learner(order)
    sizes: list[int] = []
    learner.network.register_forward_pre_hook(lambda module, inputs: sizes.append(len(inputs[0])))
    sheets = Sheets(Path("nowhere"), learner, learner.samples)  # type: ignore[arg-type]
    with torch.no_grad():
        small = sheets.paint(Execution(micro_batch=8))
    assert set(sizes) == {8}, "four images, twice"
    with torch.no_grad():
        large = sheets.paint(Execution())
    assert abs(small.astype(int) - large.astype(int)).max() <= 1
    assert learner.order.latent.shape == LATENT
