"""The map from latents to small images: against maps that are known, and on photographs."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from pydantic import ValidationError
from torch import Tensor

from atoll.data.encode import latent_space, moments
from atoll.data.prepare import prepare
from atoll.data.preview import color_sums, fitted, shrunk
from atoll.data.space import LatentConfig, PreviewMap
from atoll.models.autoencoders import load_autoencoder
from image_forms import CONFIG, folder, pictures, samples_of

OLD = {"autoencoder": "pixels", "shape": [4, 8, 8], "mean": [0.0] * 4, "scale": [1.0] * 4}
MAP = PreviewMap(weights=((1.0, 0.0, 0.5, 0.0),) * 3, bias=(0.1, 0.0, -0.1))


def known(count: int, seed: int) -> tuple[Tensor, Tensor, PreviewMap]:
    """Latents of uneven scale and small images that are a linear map of them, normalized."""
    g = torch.Generator().manual_seed(seed)
    z = torch.randn(count, 4, 8, 8, generator=g)
    weights, bias = torch.randn(3, 4, generator=g), torch.randn(3, generator=g)
    truth = PreviewMap(weights=tuple(map(tuple, weights.tolist())), bias=tuple(bias.tolist()))
    return z, truth(z), truth


def test_a_linear_map_is_found_whatever_the_latents_scale_and_however_they_are_cut() -> None:
    z, small, truth = known(40, seed=0)
    space = LatentConfig(autoencoder="x", shape=(4, 8, 8), mean=(5.0, -3.0, 0.0, 100.0), scale=(0.01, 7.0, 1.0, 2.0))
    latents = space.denormalize(z.double())
    pieces = [color_sums(latents[a:b], small[a:b]) for a, b in ((0, 1), (1, 17), (17, 17), (17, 40))]
    found = fitted(pieces, space.mean, space.scale)
    assert found is not None
    torch.testing.assert_close(torch.tensor(found.weights), torch.tensor(truth.weights), rtol=0, atol=1e-4)
    torch.testing.assert_close(torch.tensor(found.bias), torch.tensor(truth.bias), rtol=0, atol=1e-4)
    assert fitted([json.loads(json.dumps(piece)) for piece in pieces], space.mean, space.scale) == found


def test_it_is_the_best_of_all_linear_maps() -> None:
    """Where no map is exact, the error has nothing left in it that a latent or a constant could explain."""
    z, small, _ = known(40, seed=1)
    small = small + 0.3 * small.square() + torch.randn(small.shape, generator=torch.Generator().manual_seed(2))
    found = fitted([color_sums(z, small)], (0.0,) * 4, (1.0,) * 4)
    assert found is not None
    error = (small - found(z)).transpose(0, 1).flatten(1)
    assert error.mean(1).abs().max() < 1e-4
    assert (error @ z.transpose(0, 1).flatten(1).T / error.shape[1]).abs().max() < 1e-4


def test_a_channel_that_never_changes_says_nothing() -> None:
    z, small, _ = known(40, seed=3)
    z[:, 2] = 0.0
    found = fitted([color_sums(z, small)], (0.0,) * 4, (1.0,) * 4)
    assert found is not None
    assert [row[2] for row in found.weights] == [0.0] * 3


def test_nothing_to_fit_on_is_no_map() -> None:
    nothing = color_sums(torch.zeros(0, 4, 8, 8), torch.zeros(0, 3, 8, 8))
    assert fitted([nothing], (0.0,), (1.0,)) is None
    assert fitted([], (0.0,), (1.0,)) is None
    old_pieces = [{**moments(torch.randn(5, 4, 8, 8))}]  # encoded before there was a map
    assert latent_space("x", (4, 8, 8), old_pieces).preview is None


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
def test_photographs_are_recognisable(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """taef2, 32 channels: the map explains most of what small images show, on images it was not fitted on."""
    monkeypatch.setenv("ATOLL_MODELS", str(shared / "models"))
    table = pq.read_table(shared / "datasets/tiny-imagenet/val-00000.parquet", columns=["image"]).slice(0, 192)
    loaded = [Image.open(io.BytesIO(row["bytes"])).convert("RGB") for row in table["image"].to_pylist()]
    images = torch.from_numpy(np.stack([np.asarray(image) for image in loaded])).permute(0, 3, 1, 2)
    with torch.inference_mode():
        latents = load_autoencoder("taef2").encode(images)
    small = shrunk(images, latents)
    mean, std = (f(latents.transpose(0, 1).flatten(1), dim=1) for f in (torch.mean, torch.std))
    found = fitted([color_sums(latents[:128], small[:128])], mean.tolist(), std.tolist())
    assert found is not None
    unseen = (latents[128:] - mean[:, None, None]) / std[:, None, None]
    left = (found(unseen) - small[128:]).square().mean() / small[128:].var()
    assert left < 0.35, "of the variance of small images; a quarter, when this was written"
