"""Our network against diffusers' and the official ones: the same weights, the same answer, both ways."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from foreign import (
    CLASSES,
    SIDE,
    diffusers_dit,
    diffusers_pixart,
    network,
    official_dit,
    official_forward,
    official_pixart,
    save_diffusers,
)
from safetensors.torch import load_file
from torch import Tensor

from atoll.artifacts import UserError
from atoll.convert.layouts import Layout, export_weights, import_weights
from atoll.convert.source import read_source
from atoll.diffusion import Condition, Kind, LinearFlow
from atoll.models.dit import DiTConfig

STEPS = torch.tensor([0.0, 1.0, 500.0, 998.0, 999.0])


@pytest.fixture
def x() -> Tensor:
    return torch.randn(len(STEPS), 4, SIDE, SIDE, generator=torch.Generator().manual_seed(3))


@pytest.fixture
def labels() -> Tensor:
    return torch.tensor([0, 3, CLASSES - 1, CLASSES, 5])  # the last row of the table is the null label


@torch.inference_mode()
@pytest.mark.parametrize("patch", [1, 2, 4])
def test_diffusers_dit_in(tmp_path: Path, x: Tensor, labels: Tensor, patch: int) -> None:
    theirs = diffusers_dit(patch_size=patch)
    source = read_source(save_diffusers(theirs, tmp_path), "diffusers", license="MIT")
    ours = network(source.network.config, source.network.weights)
    expected = theirs(x, timestep=STEPS, class_labels=labels).sample[:, :4]  # the rest is the variance
    condition = Condition(labels=labels, dropped=labels == CLASSES)
    assert expected.std() > 0.1
    torch.testing.assert_close(ours(x, STEPS, condition), expected, atol=1e-5, rtol=1e-5)


def text() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    mask = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 0, 0, 0, 0, 0], [1, 1, 0, 0, 0, 0], [1] * 6, [1, 1, 1, 0, 0, 0]])
    return torch.randn(len(STEPS), 6, 24, generator=generator), mask.bool()


@torch.inference_mode()
@pytest.mark.parametrize("interpolation_scale", [None, 2])
def test_diffusers_pixart_in(tmp_path: Path, x: Tensor, interpolation_scale: int | None) -> None:
    theirs = diffusers_pixart(interpolation_scale=interpolation_scale)
    source = read_source(save_diffusers(theirs, tmp_path), "diffusers", license="MIT")
    tokens, mask = text()
    # a diffusers folder holds no null caption, which also says how long captions are
    weights = dict(source.network.weights, **{"conditioning.null_text": torch.zeros(120, 24)})
    tokens, mask = (torch.nn.functional.pad(v, (0, 0, 0, 114) if v.ndim == 3 else (0, 114)) for v in (tokens, mask))
    ours = network(source.network.config, weights)
    expected = theirs(x, tokens, timestep=STEPS, encoder_attention_mask=mask).sample[:, :4]
    torch.testing.assert_close(ours(x, STEPS, Condition(tokens=tokens, mask=mask)), expected, atol=1e-5, rtol=1e-5)


@torch.inference_mode()
def test_official_dit(tmp_path: Path, x: Tensor, labels: Tensor) -> None:
    state = official_dit()
    torch.save({"ema": state, "model": {k: torch.zeros_like(v) for k, v in state.items()}}, tmp_path / "dit.pt")
    source = read_source(tmp_path / "dit.pt", "dit", heads=2)
    assert source.network.config.latent == (4, SIDE, SIDE)
    assert source.network.config.positions == "sincos", "the stored table is the fixed one"
    ours = network(source.network.config, source.network.weights)
    expected = official_forward(state, x, STEPS, labels, heads=2)[:, :4]
    assert expected.std() > 0.1
    found = ours(x, STEPS, Condition(labels=labels, dropped=labels == CLASSES))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@torch.inference_mode()
def test_a_table_of_other_positions_is_kept_as_weights(tmp_path: Path, x: Tensor, labels: Tensor) -> None:
    state = official_dit()
    state["pos_embed"] = state["pos_embed"] + 0.1 * torch.randn_like(state["pos_embed"])
    torch.save(state, tmp_path / "dit.pt")
    source = read_source(tmp_path / "dit.pt", "dit", heads=2)
    assert source.network.config.positions == "learned"
    ours = network(source.network.config, source.network.weights)
    found = ours(x, STEPS, Condition(labels=labels, dropped=labels == CLASSES))
    torch.testing.assert_close(found, official_forward(state, x, STEPS, labels, 2)[:, :4], atol=1e-5, rtol=1e-5)


@torch.inference_mode()
def test_official_pixart_is_diffusers_pixart(tmp_path: Path, x: Tensor) -> None:
    """Official keys -> ours -> diffusers' names: diffusers' own class gives our answer."""
    torch.save({"state_dict": official_pixart()}, tmp_path / "pixart.pth")
    source = read_source(tmp_path / "pixart.pth", "pixart", heads=2)
    ours = network(source.network.config, source.network.weights)
    theirs = diffusers_pixart(out_channels=4)
    theirs.load_state_dict(
        export_weights("diffusers-pixart", source.network.config, source.network.weights), strict=True
    )
    tokens, mask = text()
    expected = theirs(x, tokens, timestep=STEPS, encoder_attention_mask=mask).sample
    torch.testing.assert_close(ours(x, STEPS, Condition(tokens=tokens, mask=mask)), expected, atol=1e-5, rtol=1e-5)
    # and dropping the caption reads the checkpoint's own null caption
    null = source.network.weights["conditioning.null_text"].expand(len(x), -1, -1)
    expected = theirs(x, null, timestep=STEPS).sample
    found = ours(x, STEPS, Condition(tokens=tokens, mask=mask).null())
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("layout", ["dit", "pixart", "diffusers-dit", "diffusers-pixart"])
def test_every_layout_is_a_bijection(layout: Layout) -> None:
    """Ours -> theirs -> ours: the same bits, and every tensor of ours takes part."""
    classic = layout.endswith("dit")
    config = DiTConfig(
        latent=(4, SIDE, SIDE), patch=2, width=32, depth=2, heads=2,
        variant="adaln" if classic else "adaln-single", condition="labels" if classic else "tokens",
        classes=5 if classic else None, text_width=None if classic else 6, text_length=None if classic else 3,
    )  # fmt: skip
    weights = random_network(config).state_dict()
    if layout == "diffusers-pixart":
        del weights["conditioning.null_text"]
    foreign = export_weights(layout, config, weights)
    back = import_weights(layout, config, LinearFlow(), Kind.VELOCITY, foreign, "test")
    assert back.weights.keys() == weights.keys()
    assert all(torch.equal(back.weights[name], weights[name]) for name in weights)
    assert not back.dropped


@pytest.mark.parametrize("make", [diffusers_dit, diffusers_pixart])
def test_folders_of_older_diffusers_read_the_same(tmp_path: Path, make) -> None:  # type: ignore[no-untyped-def]
    """They call both networks Transformer2DModel and keep the weights in a .bin file."""
    folder = save_diffusers(make(), tmp_path / "new")
    new = read_source(folder, "diffusers", license="MIT")
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | {"_class_name": "Transformer2DModel"}))
    weights = folder / "diffusion_pytorch_model.safetensors"
    torch.save(load_file(weights), weights.with_suffix(".bin"))
    weights.unlink()
    old = read_source(folder, "diffusers", license="MIT")
    assert old.network.config == new.network.config
    assert all(torch.equal(old.network.weights[k], v) for k, v in new.network.weights.items())


def test_untied_embedders_are_refused(tmp_path: Path) -> None:
    save_diffusers(diffusers_dit(tied=False), tmp_path)
    with pytest.raises(UserError, match="share one time and label embedder"):
        read_source(tmp_path, "diffusers", license="MIT")


def random_network(config: DiTConfig):  # type: ignore[no-untyped-def]
    from foreign import randomize

    from atoll.models.dit import DiT

    model = DiT(config).eval()
    randomize(model, seed=7)
    return model
