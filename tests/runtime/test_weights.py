"""From a file into memory: what is read, what is refused, and what need not be read again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from atoll.artifacts import UserError, sha256_file
from atoll.islands.expert import load_expert
from atoll.models.dit import DiT
from atoll.models.int8 import Int8Linear, quantised, widened
from atoll.runtime.weights import Layout, layout_of, open_weights
from tiny_experts import architecture, write_experts

CONFIG = architecture(1)


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = write_experts(tmp_path_factory.mktemp("experts"), 2)[1]
    return place / "model.safetensors"


def read(path: Path, layout: Layout | None = None) -> DiT:
    layout = layout or layout_of(CONFIG, "float32")
    memory = torch.empty(layout.nbytes, dtype=torch.uint8)
    open_weights(path, sha256_file(path), CONFIG).read_into(layout, memory)
    return layout.network(memory)


def test_the_weights_are_those_of_the_file(weights: Path) -> None:
    network, expected = read(weights), load_expert(weights.parent).network
    for name, value in expected.state_dict().items():
        assert torch.equal(network.state_dict()[name], value), name
    assert torch.equal(network.patches.positions, expected.patches.positions)
    half = read(weights, layout_of(CONFIG, "bfloat16"))
    for name, value in expected.state_dict().items():
        assert torch.equal(half.state_dict()[name], value.bfloat16()), name


def test_a_network_is_its_memory(weights: Path, tmp_path: Path) -> None:
    """Another expert's weights in the same memory make it that expert: graphs belong to slots."""
    layout = layout_of(CONFIG, "float32")
    memory = torch.empty(layout.nbytes, dtype=torch.uint8)
    network = layout.network(memory)
    for scale in (1.0, 2.0):
        path = tmp_path / f"{scale}.safetensors"
        save_file({name: scale * value for name, value in load_file(weights).items()}, path)
        open_weights(path, sha256_file(path), CONFIG).read_into(layout, memory)
        for name, value in load_file(path).items():
            assert torch.equal(network.state_dict()[name], value), name
    assert all(place.offset % 256 == 0 for place in layout.places.values())


def test_int8_is_the_weight_to_half_a_step() -> None:
    weight = torch.randn(16, 40, generator=torch.Generator().manual_seed(0)) * torch.logspace(-6, 3, 16)[:, None]
    weight[3] = 0.0
    q, scale = quantised(weight)
    assert q.dtype == torch.int8
    assert int(q.abs().max()) == 127
    back = widened(q, scale, torch.float32)
    step = scale.float()[:, None]
    # half a step, but for the largest number of a row where its scale was rounded down
    assert ((back - weight).abs() <= 0.5 * step + 127 * step * 2**-8).all()
    assert ((back - weight).norm(dim=1) <= 0.3 * step[:, 0] * 40**0.5 + 127 * step[:, 0] * 2**-8).all()
    assert torch.equal(back[3], torch.zeros(40))
    linear = Int8Linear(40, 16)
    linear.codes, linear.scale = q, scale
    with torch.no_grad():
        linear.bias.fill_(0.5)
        x = torch.randn(3, 5, 40)
        torch.testing.assert_close(linear(x), x @ back.T + 0.5)


def test_int8_is_for_blocks_and_the_rest_stays(weights: Path) -> None:
    network = read(weights, layout_of(CONFIG, "float32", int8=True))
    exact = load_file(weights)
    kept = network.state_dict()
    codes = {name.replace(".codes", ".weight") for name, value in kept.items() if value.dtype == torch.int8}
    assert codes == {name for name in exact if name.startswith("blocks.") and name.endswith(".weight")}
    for name, value in exact.items():
        if name not in codes:
            assert torch.equal(kept[name], value), name


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("fault", ["flipped", "cut", "nan", "another", "half", "missing"])
def test_what_is_not_the_expert_is_refused(weights: Path, tmp_path: Path, fault: str, precision: str) -> None:
    path, sha256 = tmp_path / "model.safetensors", sha256_file(weights)
    tensors = load_file(weights)
    content = bytearray(weights.read_bytes())
    if fault == "flipped":
        content[-3] ^= 1
        path.write_bytes(content)
    elif fault == "cut":
        path.write_bytes(content[:-4])
    elif fault == "missing":
        pass
    else:
        if fault == "nan":
            tensors["head.project.weight"][0, 0] = torch.nan
        elif fault == "another":
            tensors["head.project.weight"] = torch.zeros(2, 2)
        else:
            tensors = {name: value.half() for name, value in tensors.items()}
        save_file(tensors, path)
        sha256 = sha256_file(path)
    expected = {
        "flipped": "corrupt, sha256 is",
        "cut": "not a readable safetensors file",
        "nan": "weight head.project.weight holds values that are not finite",
        "another": "weight head.project.weight has shape",
        "half": "is F16, weights are kept as F32",
        "missing": "not a readable safetensors file",
    }[fault]
    layout = layout_of(CONFIG, precision)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=expected):
        file = open_weights(path, sha256, CONFIG)
        file.read_into(layout, torch.empty(layout.nbytes, dtype=torch.uint8))


def test_a_card_that_asks_for_too_much_costs_nothing(weights: Path) -> None:
    with pytest.raises(UserError, match="do not fit the card's architecture"):
        open_weights(weights, "0" * 64, replace(CONFIG, depth=10**6))
