"""Autoencoders against the classes their weights come from."""

from __future__ import annotations

import importlib.util
import io
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from atoll.artifacts import UserError
from atoll.models.autoencoders import Autoencoder, Pixels, load_autoencoder
from atoll.models.block_transform import BlockTransform
from atoll.models.tiny_autoencoder import TinyAutoencoder
from pretrained_folders import kl_folder, tiny_folder


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATOLL_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("ATOLL_MODELS", raising=False)


def pictures(count: int = 2, size: int = 32) -> Tensor:
    return torch.randint(0, 256, (count, 3, size, size), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def test_pixels_are_their_own_latents() -> None:
    images = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16)
    assert torch.equal(Pixels().decode(Pixels().encode(images)), images)
    assert Pixels().encode(images).aminmax() == (-1.0, 1.0)


@pytest.mark.parametrize(("make", "reduction"), [(tiny_folder, 8), (kl_folder, 2)])
def test_a_diffusers_folder(tmp_path: Path, make, reduction: int) -> None:  # type: ignore[no-untyped-def]
    folder = make(tmp_path / "vae")
    autoencoder = load_autoencoder(str(folder))
    assert isinstance(autoencoder, Autoencoder)
    assert autoencoder.id.startswith("vae@")
    assert len(autoencoder.id) == len("vae@") + 12
    side = 32 // reduction
    assert autoencoder.latent_shape(3, 32) == (4, side, side)
    latents = autoencoder.encode(pictures())
    assert latents.shape == (2, 4, side, side)
    assert latents.dtype == torch.float32
    images = autoencoder.decode(latents)
    assert images.shape == (2, 3, 32, 32)
    assert images.dtype == torch.uint8


def test_whoever_works_elsewhere_takes_nobodys_network_away(tmp_path: Path) -> None:
    """One process, two devices, one autoencoder: `meta` stands for a card this machine may not have."""
    folder = str(tiny_folder(tmp_path / "vae"))
    ours, theirs = load_autoencoder(folder), load_autoencoder(folder)
    latents = ours.encode(pictures())
    assert theirs.decode(latents.to("meta")).device.type == "meta"
    assert {p.device.type for p in ours.network.parameters()} == {"cpu"}  # type: ignore[attr-defined]
    assert torch.equal(ours.decode(latents), theirs.decode(latents))


def test_a_copy_made_in_inference_mode_can_be_used_outside(tmp_path: Path) -> None:
    autoencoder = load_autoencoder(str(tiny_folder(tmp_path / "vae")))
    with torch.inference_mode():
        autoencoder.encode(pictures().to("meta"))
    latents = torch.zeros(1, 4, 4, 4, device="meta", requires_grad=True)
    assert not autoencoder.decode(latents).is_inference()


def test_a_kl_latent_is_the_posterior_mean(tmp_path: Path) -> None:
    from diffusers import AutoencoderKL

    folder = kl_folder(tmp_path / "vae")
    theirs = AutoencoderKL.from_pretrained(folder).eval()
    with torch.inference_mode():
        expected = theirs.encode(pictures() / 127.5 - 1.0).latent_dist.mean
        torch.testing.assert_close(load_autoencoder(str(folder)).encode(pictures()), expected, atol=1e-5, rtol=1e-5)


def test_an_id_finds_its_weights_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tiny_folder(tmp_path / "models" / "taesd")
    id = load_autoencoder(str(folder)).id
    assert load_autoencoder(id).id == id, "this machine remembers where it saw them"
    monkeypatch.setenv("ATOLL_CACHE", str(tmp_path / "another machine"))
    with pytest.raises(UserError, match="ATOLL_MODELS"):
        load_autoencoder(id)
    monkeypatch.setenv("ATOLL_MODELS", str(tmp_path / "models"))
    assert load_autoencoder(id).id == id
    assert load_autoencoder("taesd").id == id
    monkeypatch.setenv("ATOLL_MODELS", str(folder))
    assert load_autoencoder("taesd").id == id


def test_other_weights_under_the_same_name_are_refused(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path / "taesd")
    id = load_autoencoder(str(folder)).id
    weights = load_file(folder / "diffusion_pytorch_model.safetensors")
    weights["encoder.layers.0.bias"] += 1
    save_file(weights, folder / "diffusion_pytorch_model.safetensors")
    with pytest.raises(UserError, match="its weights are"):
        load_autoencoder(id)


def test_images_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    autoencoder = load_autoencoder(str(tiny_folder(tmp_path / "vae")))
    with pytest.raises(UserError, match="RGB"):
        autoencoder.latent_shape(1, 32)
    with pytest.raises(UserError, match="multiple of 8"):
        autoencoder.latent_shape(3, 36)


def test_folders_that_are_no_autoencoder_are_refused(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path / "vae")
    settings = json.loads((folder / "config.json").read_text())
    for change, complaint in [
        ({"_class_name": "VQModel"}, "only AutoencoderKL"),
        ({"_class_name": "AutoencoderTinyFlux2"}, "not those of a tiny autoencoder"),
        ({"act_fn": "silu"}, "act_fn"),
    ]:
        (folder / "config.json").write_text(json.dumps(settings | change))
        with pytest.raises(UserError, match=complaint):
            load_autoencoder(str(folder))
    (folder / "config.json").write_text("{")
    with pytest.raises(UserError, match="not JSON"):
        load_autoencoder(str(folder))
    with pytest.raises(UserError, match="no such model"):
        load_autoencoder("unheard-of")


def test_the_tiny_autoencoder_is_diffusers_own() -> None:
    from diffusers import AutoencoderTiny

    torch.manual_seed(0)
    theirs = AutoencoderTiny(latent_channels=4).eval()
    ours = TinyAutoencoder(4).eval()
    ours.load_state_dict(theirs.state_dict(), strict=True)
    x, z = torch.rand(2, 3, 32, 48) * 2 - 1, 2 * torch.randn(2, 4, 4, 6)
    with torch.inference_mode():
        torch.testing.assert_close(ours.encode(x), theirs.encode(x).latents, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(ours.decode(z), theirs.decode(z).sample, atol=1e-5, rtol=1e-5)


def tiny_imagenet(shared: Path, count: int) -> Tensor:
    """The first validation images, [-1, 1]."""
    import numpy as np
    import pyarrow.parquet as pq
    from PIL import Image

    table = pq.read_table(shared / "datasets/tiny-imagenet/val-00000.parquet", columns=["image"]).slice(0, count)
    images = [np.asarray(Image.open(io.BytesIO(row["bytes"])).convert("RGB")) for row in table["image"].to_pylist()]
    return torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2).float() / 127.5 - 1.0


@pytest.mark.shared
def test_taef2_is_the_class_it_came_with(shared: Path) -> None:
    folder = shared / "models/taef2"
    spec = importlib.util.spec_from_file_location("taef2", folder / "taef2.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    theirs = module.AutoencoderTinyFlux2.from_pretrained(folder, torch_dtype=torch.float32).eval()
    ours = TinyAutoencoder(32, pooled=True).eval()
    weights = load_file(folder / "diffusion_pytorch_model.safetensors")
    ours.load_state_dict({name: value.float() for name, value in weights.items()}, strict=True)
    x = tiny_imagenet(shared, 8)
    with torch.inference_mode():
        z = ours.encode(x)
        torch.testing.assert_close(z, theirs.encode(x).latents, atol=1e-4, rtol=1e-5)
        back = ours.decode(z)
        torch.testing.assert_close(back, theirs.decode(z).sample, atol=1e-4, rtol=1e-5)
    assert z.shape == (8, 32, 8, 8)
    psnr = 10 * torch.log10(4.0 / (back.clamp(-1, 1) - x).square().mean((1, 2, 3)))
    assert psnr.mean() > 20, "the wrong blocks give 14.5 dB"


@pytest.mark.shared
def test_taef2_by_name(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATOLL_MODELS", str(shared / "models"))
    taef2 = load_autoencoder("taef2")
    assert taef2.id == "taef2@708ac330b0cb"
    assert taef2.latent_shape(3, 64) == (32, 8, 8)
    images = ((tiny_imagenet(shared, 4) + 1) * 127.5).round().to(torch.uint8)
    back = taef2.decode(taef2.encode(images))
    error = (back.float() - images.float()).square().mean((1, 2, 3))
    assert (10 * torch.log10(255**2 / error)).mean() > 20


@pytest.mark.parametrize(("name", "channels"), [("dct-2", 5), ("dct-4", 16), ("dct-8", 56), ("dct-16", 208)])
def test_the_block_transform_is_scipys_cosine_transform_of_every_block(name: str, channels: int) -> None:
    fft = pytest.importorskip("scipy.fft")
    found, side = load_autoencoder(name), int(name.removeprefix("dct-"))
    images = torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    latents = found.encode(images)
    assert found.id == name
    assert latents.shape[1:] == found.latent_shape(3, 32) == (channels, 32 // side, 32 // side)
    red, green, blue = (images[1].double() / 127.5 - 1.0).unbind(0)
    brightness = (red + green + blue) / 3**0.5
    block = fft.dctn(brightness[side : 2 * side, :side].numpy(), norm="ortho")
    own = latents[1, :, 1, 0].double()
    assert own[0].item() == pytest.approx(block[0, 0], abs=1e-5)
    assert own[1:3].tolist() == pytest.approx([block[0, 1], block[1, 0]], abs=1e-5)
    first_difference = side * (side + 1) // 2
    block = fft.dctn(((red - blue) / 2**0.5)[side : 2 * side, :side].numpy(), norm="ortho")
    assert own[first_difference].item() == pytest.approx(block[0, 0], abs=1e-5)


def test_the_block_transform_keeps_smooth_images_and_gives_the_nearest_of_others() -> None:
    found = load_autoencoder("dct-4")
    ramp = torch.linspace(20, 230, 32)
    smooth = torch.stack([ramp[:, None].expand(32, 32), ramp.expand(32, 32), 0.5 * (ramp[:, None] + ramp)])
    smooth = smooth.round().to(torch.uint8)[None]
    back = found.decode(found.encode(smooth))
    assert (back.float() - smooth.float()).abs().max() <= 4
    weights = BlockTransform(4).weights.flatten(1)
    torch.testing.assert_close(weights @ weights.T, torch.eye(16), rtol=0, atol=1e-6)  # so decoding projects
    with pytest.raises(UserError, match="takes RGB images"):
        found.latent_shape(1, 32)
    with pytest.raises(UserError, match="needs a multiple of 4"):
        found.latent_shape(3, 30)
