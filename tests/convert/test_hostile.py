"""Files from strangers: nothing runs, nothing explodes, and the refusal is one line."""

from __future__ import annotations

import argparse
import io
import json
import os
import pickle
import random
import zipfile
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from foreign import diffusers_dit, diffusers_pixart, official_dit, official_pixart, save_diffusers
from safetensors.torch import save_file
from torch import Tensor

from atoll.artifacts import UserError
from atoll.convert.source import Form, read_source


class Trap:
    """A pickle that writes a file when it is loaded by a careless reader."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return os.mkdir, (str(self.path),)


def refuse(path: Path, form: Form = "dit") -> str:
    """The one line with which a file is refused."""
    with pytest.raises(UserError) as caught:
        read_source(path, form, heads=2, license="MIT")
    line = str(caught.value)
    assert "\n" not in line
    assert len(line) < 600
    return line


@pytest.mark.parametrize("wrap", [lambda trap: trap, lambda trap: {"ema": {"x": trap}}, lambda trap: {"args": trap}])
def test_a_pickle_with_code_does_not_run(tmp_path: Path, wrap: Callable[[Trap], Any]) -> None:
    sprung = tmp_path / "sprung"
    torch.save(wrap(Trap(sprung)), tmp_path / "trap.pt")
    assert "holds more than tensors" in refuse(tmp_path / "trap.pt")
    assert not sprung.exists()
    with (tmp_path / "plain.pt").open("wb") as stream:
        pickle.dump(wrap(Trap(sprung)), stream)
    refuse(tmp_path / "plain.pt")
    assert not sprung.exists()


def test_a_namespace_is_the_one_class_let_in(tmp_path: Path) -> None:
    torch.save({"ema": official_dit(), "args": argparse.Namespace(lr=1e-4)}, tmp_path / "good.pt")
    assert read_source(tmp_path / "good.pt", "dit", heads=2).network.config.depth == 3
    torch.save({"ema": official_dit(), "args": Fraction(1, 3)}, tmp_path / "bad.pt")
    assert "holds more than tensors" in refuse(tmp_path / "bad.pt")


def test_a_zip_bomb_is_not_unfolded(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    torch.save({"x": torch.zeros(1000)}, buffer)
    with zipfile.ZipFile(buffer) as good, zipfile.ZipFile(tmp_path / "b.pt", "w", zipfile.ZIP_DEFLATED) as bad:
        for entry in good.namelist():
            data = good.read(entry) if "data/" not in entry else bytes(50_000_000)
            bad.writestr(entry, data)
    assert "compressed" in refuse(tmp_path / "b.pt")


def test_a_tensor_that_claims_more_than_it_holds(tmp_path: Path) -> None:
    torch.save({"x_embedder.proj.weight": torch.zeros(1).expand(100_000, 100_000)}, tmp_path / "big.pt")
    assert "claims 10,000,000,000 values" in refuse(tmp_path / "big.pt")


def test_an_absurd_safetensors_header(tmp_path: Path) -> None:
    header = json.dumps({"x": {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]}}).encode()
    (tmp_path / "big.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    refuse(tmp_path / "big.safetensors")
    (tmp_path / "long.safetensors").write_bytes((2**60).to_bytes(8, "little"))
    refuse(tmp_path / "long.safetensors")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_are_not_finite(tmp_path: Path, value: float) -> None:
    state = official_dit()
    state["blocks.1.mlp.fc2.bias"][3] = value
    torch.save(state, tmp_path / "nan.pt")
    assert "blocks.1.mlp.fc2.bias' holds values that are not finite" in refuse(tmp_path / "nan.pt")


def damaged(state: dict[str, Tensor]) -> dict[str, dict[str, Any]]:
    """Ways for a table of tensors to be wrong."""
    sparse = torch.zeros(32, 32).to_sparse()
    return {
        "empty": {},
        "a tensor for a table": torch.zeros(3),  # type: ignore[dict-item]
        "numbers for names": {0: torch.zeros(3)},  # type: ignore[dict-item]
        "a list for a tensor": {**state, "x_embedder.proj.bias": [1.0]},
        "missing key": {k: v for k, v in state.items() if k != "blocks.2.attn.proj.bias"},
        "wrong shape": {**state, "blocks.0.attn.qkv.weight": torch.zeros(96, 31)},
        "transposed": {**state, "blocks.0.attn.qkv.weight": state["blocks.0.attn.qkv.weight"].T.contiguous()},
        "wrong rank": {**state, "x_embedder.proj.weight": torch.zeros(32)},
        "empty tensor": {**state, "x_embedder.proj.weight": torch.zeros(0, 4, 2, 2)},
        "scalar": {**state, "final_layer.linear.weight": torch.tensor(1.0)},
        "missing block": {k: v for k, v in state.items() if not k.startswith("blocks.1.")},
        "huge block number": {**state, "blocks.99999.attn.qkv.weight": torch.zeros(1)},
        "sparse": {**state, "blocks.0.attn.proj.weight": sparse},
        "complex": {**state, "blocks.0.attn.proj.weight": torch.zeros(32, 32, dtype=torch.complex64)},
        "other positions": {**state, "pos_embed": torch.zeros(1, 7, 32)},
        "1024 px": {**state, "csize_embedder.mlp.0.weight": torch.zeros(3)},
    }


@pytest.mark.parametrize("how", list(damaged(official_dit())))
def test_damaged_tables(tmp_path: Path, how: str) -> None:
    torch.save(damaged(official_dit())[how], tmp_path / "bad.pt")
    refuse(tmp_path / "bad.pt")


@pytest.mark.parametrize(
    "change",
    [
        {"_class_name": "UNet2DConditionModel"},
        {"sample_size": 10**9},
        {"sample_size": "32"},
        {"sample_size": True},
        {"sample_size": 7},
        {"num_attention_heads": 0},
        {"num_attention_heads": 3},
        {"activation_fn": "geglu"},
        {"norm_type": "layer_norm"},
        {"norm_eps": 1e-2, "_class_name": "PixArtTransformer2DModel"},
        {"norm_elementwise_affine": True},
    ],
    ids=str,
)
def test_diffusers_configs_that_lie(tmp_path: Path, change: dict[str, Any]) -> None:
    folder = save_diffusers(diffusers_dit(), tmp_path / "model")
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | change))
    refuse(folder, "diffusers")


@pytest.mark.parametrize("content", ["", "{", "[]", "null", "[" * 100_000, '{"_class_name": 3}'])
def test_diffusers_configs_that_are_no_configs(tmp_path: Path, content: str) -> None:
    folder = save_diffusers(diffusers_dit(), tmp_path / "model")
    (folder / "config.json").write_text(content)
    refuse(folder, "diffusers")


@pytest.mark.parametrize("content", ["{}", '{"card": 3}', '{"card": {"architecture": {}}}', "x"])
def test_sidecars_that_are_none(tmp_path: Path, content: str) -> None:
    folder = save_diffusers(diffusers_dit(), tmp_path / "model")
    (folder / "atoll.json").write_text(content)
    refuse(folder, "diffusers")


def test_a_1024_px_pixart_is_refused(tmp_path: Path) -> None:
    folder = save_diffusers(diffusers_pixart(use_additional_conditions=True), tmp_path / "model")
    assert "image size and aspect" in refuse(folder, "diffusers")


def test_a_folder_without_a_license_is_refused(tmp_path: Path) -> None:
    folder = save_diffusers(diffusers_dit(), tmp_path / "model")
    with pytest.raises(UserError, match="--license"):
        read_source(folder, "diffusers")
    (folder / "README.md").write_text("---\nlicense: openrail++\n---\n")
    assert read_source(folder, "diffusers").license == "openrail++"


@pytest.mark.parametrize("name", ["dit.pt", "dit.safetensors", "pixart.pth"])
def test_fuzzed_files_are_read_or_refused(tmp_path: Path, name: str) -> None:
    """Random damage never ends in anything but a network of the expected shapes or one line."""
    state = official_pixart(width=16, depth=1) if "pixart" in name else official_dit(width=16, depth=1)
    form: Form = "pixart" if "pixart" in name else "dit"
    path = tmp_path / name
    if path.suffix == ".safetensors":
        save_file(state, path)
    else:
        torch.save(state, path)
    good = path.read_bytes()
    chance = random.Random(0)
    refused = 0
    for _ in range(150):
        data = bytearray(good)
        # the structure sits at the front (pickle, header) and at the back (zip directory)
        for _ in range(chance.choice([1, 2, 8])):
            edge = chance.choice([2_000, len(data)])
            position = chance.randrange(edge) if chance.random() < 0.5 else len(data) - 1 - chance.randrange(edge)
            data[position % len(data)] = chance.randrange(256)
        if chance.random() < 0.2:
            del data[chance.randrange(len(data)) :]
        path.write_bytes(bytes(data))
        try:
            source = read_source(path, form, heads=2, license="MIT")
        except UserError as error:
            refused += str(error).count("\n") == 0
        else:
            assert source.network.config.width == 16
            assert all(bool(torch.isfinite(v).all()) for v in source.network.weights.values())
    assert refused > 20, "the damage must matter for this to be a test"
