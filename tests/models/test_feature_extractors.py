"""Feature extractors on real weights and real images."""

from __future__ import annotations

import io
import os
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from atoll.artifacts import Artifact, UserError, sha256_file
from atoll.data.config import PrepareConfig
from atoll.data.index import Index
from atoll.data.prepare import prepare
from atoll.models.feature_extractors import DINOV2, best_extractor, extractor_id, load_extractor
from atoll.models.inception import network_of_fidelity
from atoll.partition.assignment import assigned_clusters
from atoll.partition.methods import PartitionConfig
from atoll.partition.report import agreement, read_clusters
from atoll.partition.stage import partition


def val_images(shared: Path, count: int) -> tuple[torch.Tensor, list[str]]:
    table = pq.ParquetFile(shared / "datasets/tiny-imagenet/val-00000.parquet").read_row_group(0).slice(0, count)
    images = [np.asarray(Image.open(io.BytesIO(row["image"]["bytes"])).convert("RGB")) for row in table.to_pylist()]
    return torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2), table["caption"].to_pylist()


@pytest.mark.shared
def test_efficientnet_tells_classes_apart(shared: Path) -> None:
    """Images of one class are nearer to each other than to others: the preprocessing is right."""
    pytest.importorskip("efficientnet_lite_pytorch", reason="needs efficientnet_lite_pytorch: NOT TESTED HERE")
    images, captions = val_images(shared, 3000)
    chosen = [i for i, c in enumerate(captions) if c in sorted(set(captions))[:6]]
    with torch.inference_mode():
        features = load_extractor("efficientnet-lite0", "cpu").extract(images[chosen])
    assert features.shape == (len(chosen), 1280)
    unit = torch.nn.functional.normalize(features, dim=1)
    near = (unit @ unit.T).fill_diagonal_(-1).argmax(1)
    right = np.mean([captions[chosen[i]] == captions[chosen[int(j)]] for i, j in enumerate(near)])
    assert right > 0.6, "chance is about 0.17"


def test_dinov2_by_a_folder(tmp_path: Path) -> None:
    """A tiny DINOv2 with random weights, saved and loaded as a real one is."""
    transformers = pytest.importorskip("transformers", reason="needs transformers: NOT TESTED HERE")
    torch.manual_seed(0)
    config = transformers.Dinov2Config(
        hidden_size=24, num_hidden_layers=2, num_attention_heads=3, image_size=28, patch_size=14, mlp_ratio=2
    )
    network = transformers.Dinov2Model(config).eval()
    network.save_pretrained(tmp_path / "dino")
    extractor = load_extractor(f"dinov2:{tmp_path / 'dino'}", "cpu")
    assert extractor.id.startswith("dinov2:dino@")
    assert extractor_id(f"dinov2:{tmp_path / 'dino'}") == extractor.id
    images = torch.randint(0, 256, (3, 3, 28, 28), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    mean, std = (torch.tensor(v).view(1, 3, 1, 1) for v in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
    with torch.inference_mode():
        expected = network(pixel_values=(images / 255.0 - mean) / std).last_hidden_state[:, 0]
        torch.testing.assert_close(extractor.extract(images), expected, atol=1e-5, rtol=1e-5)


def test_inception_is_torch_fidelitys_and_needs_no_torchvision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With random weights of the right shapes: the real ones are a download."""
    pytest.importorskip("tqdm", reason="needs what torch-fidelity needs: NOT TESTED HERE")
    if not find_spec("torch_fidelity"):
        pytest.skip("needs torch-fidelity: NOT TESTED HERE")
    monkeypatch.setitem(sys.modules, "torchvision", None)
    module = network_of_fidelity()
    made = module.FeatureExtractorInceptionV3
    torch.manual_seed(0)
    with monkeypatch.context() as patch:
        patch.setattr(module, "load_state_dict_from_url", lambda *_, **__: {})
        patch.setattr(made, "load_state_dict", lambda *_: None)
        network = made("inception", ["2048"])
    weights = tmp_path / "weights.pth"
    torch.save(network.state_dict(), weights)
    extractor = load_extractor(f"inception:{weights}", "cpu")
    assert extractor.id == extractor_id(f"inception:{weights}") == f"inception@{sha256_file(weights)[:12]}"
    images = torch.randint(0, 256, (2, 1, 24, 24), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    expected = network(images.expand(-1, 3, -1, -1))[0]
    assert expected.shape == (2, 2048)
    torch.testing.assert_close(extractor.extract(images), expected, rtol=1e-5, atol=1e-6)
    torch.save({"a": os.system}, weights)  # no weights, but something that runs when it is read
    with pytest.raises(UserError, match="are not its weights"):
        load_extractor.__wrapped__(f"inception:{weights}", "cpu")


def test_inception_weights_that_cannot_be_had_are_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not find_spec("torch_fidelity"):
        pytest.skip("needs torch-fidelity: NOT TESTED HERE")
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.setattr(network_of_fidelity(), "URL_INCEPTION_V3", "http://127.0.0.1:9/weights-inception-0123abcd.pth")
    with pytest.raises(UserError, match=r"its weights cannot be had .*fetch http.* elsewhere, and put it") as refused:
        extractor_id("inception")
    assert "\n" not in str(refused.value)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/weights-inception-0123abcd.pth").write_bytes(b"weights")
    monkeypatch.setenv("ATOLL_MODELS", str(tmp_path / "mine"))
    known = extractor_id("inception")
    assert known.startswith("inception@")
    assert extractor_id(known) == known
    with pytest.raises(UserError, match="expected inception@000000000000"):
        extractor_id("inception@000000000000")


def test_who_names_no_extractor_gets_the_best_this_machine_can_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "empty"))
    monkeypatch.setenv("ATOLL_MODELS", str(tmp_path))
    assert best_extractor("cuda") == "efficientnet-lite0", "no weights, no network"
    (tmp_path / DINOV2).mkdir(parents=True)
    (tmp_path / DINOV2 / "model.safetensors").write_bytes(b"weights")
    assert best_extractor("cuda") == "dinov2"
    assert best_extractor("cpu") == "efficientnet-lite0", "two seconds an image are no default"


def test_an_id_needs_no_network(tmp_path: Path) -> None:
    """The process that hands out the work need not hold what its workers hold; it refuses what they could not load."""
    pytest.importorskip("transformers", reason="needs transformers: NOT TESTED HERE")
    assert extractor_id("pixels") == load_extractor("pixels", "cpu").id
    (tmp_path / "model.safetensors").write_bytes(b"no weights, and nobody looks")
    with pytest.raises(UserError, match=r"holds no DINOv2 \(no config\.json\)"):
        extractor_id(f"dinov2:{tmp_path}")
    (tmp_path / "config.json").write_text("{}")
    assert extractor_id(f"dinov2:{tmp_path}").startswith(f"dinov2:{tmp_path.name}@")


def test_unknown_extractors_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--features vgg: not known"):
        load_extractor("vgg", "cpu")
    with pytest.raises(UserError, match="nowhere"):
        load_extractor(f"dinov2:{tmp_path}/nowhere", "cpu")


@pytest.mark.shared
def test_clusters_of_real_images_know_their_labels(shared: Path, tmp_path: Path) -> None:
    """500 Tiny ImageNet images through the whole of prepare and partition, against random and plain pixels."""
    pytest.importorskip("efficientnet_lite_pytorch", reason="needs efficientnet_lite_pytorch: NOT TESTED HERE")
    table = pq.read_table(shared / "datasets/tiny-imagenet/val-00000.parquet")
    labels = table["label"].to_numpy()
    chosen = np.flatnonzero(labels < 200)[labels % 20 == 0][:500]
    (tmp_path / "source").mkdir()
    pq.write_table(table.take(chosen), tmp_path / "source" / "some.parquet")
    config = PrepareConfig(size=32, features="efficientnet-lite0")
    data = prepare(str(tmp_path / "source"), tmp_path / "data", config)
    assert len(Index.of(data)) == 500
    cut = partition(tmp_path / "data", tmp_path / "partition", PartitionConfig(clusters=8))
    index = Index.of(Artifact.open(tmp_path / "data"))
    clusters = np.random.default_rng(0).permutation(assigned_clusters(index, cut))
    assert read_clusters(cut)["nmi"] > 5 * agreement(index.labels, clusters)
