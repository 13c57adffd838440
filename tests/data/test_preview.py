"""The map from latents to small images: against maps that are known, and on photographs."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from pydantic import ValidationError

from atoll.data.prepare import prepare
from atoll.data.space import LatentConfig, PreviewMap, fit_preview, scale_of
from atoll.models.autoencoders import load_autoencoder, to_bytes, to_unit
from image_forms import CONFIG, folder, pictures, samples_of

OLD = {"autoencoder": "pixels", "shape": [4, 8, 8], "mean": [0.0] * 4, "scale": [1.0] * 4}
MAP = PreviewMap(weights=((1.0, 0.0, 0.5, 0.0),) * 3, bias=(0.1, 0.0, -0.1))


def test_a_linear_map_is_found() -> None:
    """Up to the rounding of images to bytes; a channel that never changes has no weight."""
    g = torch.Generator().manual_seed(0)
    z = torch.randn(40, 4, 8, 8, generator=g)
    z[:, 2] = 0.0
    truth = torch.einsum("ic,nchw->nihw", torch.randn(3, 4, generator=g), z) + 0.3
    scale = 1.0 / float(truth.abs().max())
    found = fit_preview(z, to_bytes(scale * truth))
    torch.testing.assert_close(found(z), scale * truth, rtol=0, atol=2e-3)
    assert [row[2] for row in found.weights] == [0.0] * 3


def test_a_constant_channel_keeps_its_scale() -> None:
    assert scale_of(np.array([5.0, 0.0, 1e9]), np.array([2.0, 0.0, 1.0])).tolist() == [2.0, 1.0, 1.0]


@pytest.mark.parametrize("source", ["digits", "pictures"])
def test_prepared_pixels_have_the_map_that_gives_them_back(source: str, tmp_path: Path) -> None:
    if source == "digits":
        data = prepare("digits", tmp_path / "data")
    else:
        data = prepare(folder(tmp_path / "source", pictures(40)), tmp_path / "data", CONFIG)
    space = LatentConfig.model_validate(data.config["latent"])
    latents = samples_of(data).latents(torch.arange(30))
    decoded = (space.denormalize(latents) + 1.0) * 127.5
    assert (space.previews(latents).float() - decoded).abs().max() <= 1.0


def test_spaces_that_differ_in_the_map_only_are_the_same_space() -> None:
    old = LatentConfig.model_validate(OLD)
    new = old.model_copy(update={"preview": MAP})
    assert old != new
    assert old.same_space(new)
    assert not old.same_space(new.model_copy(update={"mean": (1.0,) * 4}))


@pytest.mark.parametrize(
    "preview",
    [
        {"weights": [[1.0] * 3] * 3, "bias": [0.0] * 3},
        {"weights": [[1.0] * 4] * 2, "bias": [0.0] * 2},
        {"weights": [[1.0] * 4] * 3, "bias": [0.0]},
        {"weights": [[1.0] * 4, [1.0] * 4, [1.0]], "bias": [0.0] * 3},
        {"weights": [], "bias": []},
        {"weights": [[float("inf")] * 4] * 3, "bias": [0.0] * 3},
        {"weights": [[1.0] * 4] * 3, "bias": [0.0] * 3, "gamma": 2.2},
    ],
)
def test_a_map_that_does_not_fit_is_refused(preview: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        LatentConfig.model_validate({**OLD, "preview": preview})


def test_without_a_map_the_first_channels_are_shown() -> None:
    space = LatentConfig.model_validate(OLD)
    assert space.previews(torch.full((2, 4, 8, 8), 2.0)).unique().tolist() == [255]
    assert space.previews(torch.zeros(2, 4, 8, 8)).shape == (2, 3, 8, 8)
    two = LatentConfig.model_validate({**OLD, "shape": [2, 8, 8], "mean": [0.0] * 2, "scale": [1.0] * 2})
    assert two.previews(torch.zeros(2, 2, 8, 8)).shape == (2, 1, 8, 8)


@pytest.mark.shared
def test_photographs_are_recognizable(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """taef2, 32 channels: the map explains most of what small images show, on images it was not fitted on."""
    monkeypatch.setenv("ATOLL_MODELS", str(shared / "models"))
    table = pq.read_table(shared / "datasets/tiny-imagenet/val-00000.parquet", columns=["image"]).slice(0, 192)
    loaded = [Image.open(io.BytesIO(row["bytes"])).convert("RGB") for row in table["image"].to_pylist()]
    images = torch.from_numpy(np.stack([np.asarray(image) for image in loaded])).permute(0, 3, 1, 2)
    autoencoder = load_autoencoder("taef2")
    with torch.inference_mode():
        latents = autoencoder.encode(images)
        decoded = autoencoder.decode(latents[:64])
    mean, std = (f(latents.transpose(0, 1).flatten(1), dim=1) for f in (torch.mean, torch.std))
    normalized = (latents - mean[:, None, None]) / std[:, None, None]
    truth = F.adaptive_avg_pool2d(to_unit(images[64:]), latents.shape[-1])
    left = (fit_preview(normalized[:64], decoded)(normalized[64:]) - truth).square().mean() / truth.var()
    assert left < 0.35, "of the variance of small images; a quarter, when this was written"
