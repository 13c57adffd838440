"""Autoencoders against the classes their weights come from."""

from __future__ import annotations

import importlib.util
import io
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from atoll.models.tiny_autoencoder import TinyAutoencoder


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
