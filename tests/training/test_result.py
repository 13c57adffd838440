"""Weights from strangers: refused before they cost anything, or loaded bit for bit without a network being drawn."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from atoll.artifacts import UserError
from atoll.data.space import LatentConfig
from atoll.diffusion import Condition, Kind, LinearFlow
from atoll.islands.expert import ExpertCard, load_expert, write_expert
from atoll.models.dit import DiT, DiTConfig
from atoll.models.router import RouterConfig, build_router
from atoll.router.card import RouterCard, load_router, router_result
from atoll.training.result import write_result
from runs import resealed

LATENT = (4, 8, 8)
CONFIG = DiTConfig(latent=LATENT, patch=2, width=32, depth=2, heads=2, condition="words", vocabulary=9, text_length=4)
SPACE = LatentConfig(autoencoder="pixels", shape=LATENT, mean=(0.0,) * 4, scale=(1.0,) * 4)


@pytest.fixture
def expert(tmp_path: Path) -> Path:
    card = ExpertCard(architecture=CONFIG, schedule=LinearFlow(), kind=Kind.VELOCITY, latent=SPACE, images=0)
    write_expert(tmp_path / "expert", awake(DiT(CONFIG)).state_dict(), card, [], {})
    return tmp_path / "expert"


def awake(network: torch.nn.Module) -> torch.nn.Module:
    """No layer silent, so that every weight counts in the answer."""
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.2, generator=torch.Generator().manual_seed(parameter.numel()))
    return network


def question() -> tuple[torch.Tensor, torch.Tensor, Condition]:
    x = torch.randn(3, *LATENT, generator=torch.Generator().manual_seed(0))
    return x, torch.tensor([1.0, 500.0, 999.0]), Condition(tokens=torch.tensor([[0, 1, 2, 3]] * 3))


@pytest.mark.parametrize("positions", ["sincos", "learned"])
def test_a_loaded_network_is_the_one_that_was_written(tmp_path: Path, positions: str) -> None:
    """Bit for bit what a network that was drawn and overwritten is, table of positions and all; and all its own."""
    config = DiTConfig(**{**CONFIG.__dict__, "positions": positions})
    card = ExpertCard(architecture=config, schedule=LinearFlow(), kind=Kind.VELOCITY, latent=SPACE, images=0)
    write_expert(tmp_path / "expert", awake(DiT(config)).state_dict(), card, [], {})
    old = DiT(config).eval().requires_grad_(False)
    old.load_state_dict(load_file(tmp_path / "expert" / "model.safetensors"))

    new = load_expert(tmp_path / "expert").network
    (tmp_path / "expert" / "model.safetensors").write_bytes(b"gone")
    tensors = {**dict(new.named_parameters()), **dict(new.named_buffers())}
    assert tensors.keys() == {**dict(old.named_parameters()), **dict(old.named_buffers())}.keys()
    assert {t.device.type for t in tensors.values()} == {"cpu"}
    assert not any(t.requires_grad for t in tensors.values())
    assert not new.training
    assert new.patches.positions.equal(old.patches.positions)
    assert all(value.equal(old.state_dict()[name]) for name, value in new.state_dict().items())
    assert new(*question()).equal(old(*question()))
    assert new(*question()).abs().min() > 0


def test_a_loaded_router_is_the_one_that_was_written(tmp_path: Path) -> None:
    config = RouterConfig(trunk=CONFIG, clusters=3)
    old = awake(build_router(config)).eval()
    card = RouterCard(architecture=config, latent=SPACE, partition="", images=0)
    write_result(tmp_path / "router", "router", old.state_dict(), router_result(card, {}, {}), [], parents={})
    assert load_router(tmp_path / "router").network(*question()).equal(old(*question()))


def test_loading_needs_no_compiler(expert: Path) -> None:
    """A second and a half of imports: more than a small ensemble takes to load."""
    code = f"import sys; from atoll.islands.expert import load_expert; load_expert({str(expert)!r}); "
    out = subprocess.run(
        [sys.executable, "-c", code + "print('torch._dynamo' in sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert out.stdout.strip() == "False"


HOSTILE = {
    "width": ({"width": 100_000, "depth": 1000}, "depth 1000 and width 100000 for"),
    "width alone": ({"width": 100_000}, "depth 2 and width 100000 for"),
    "depth alone": ({"depth": 10**9}, "depth 1000000000 and width 32 for"),
    "latent": ({"latent": [4, 10**6, 10**6]}, "250,000,000,000 image tokens"),
    "mlp": ({"mlp_ratio": 1e9}, "mlp.enter.bias has shape|mlp.enter.weight has shape"),
    "mlp beyond 64 bits": ({"mlp_ratio": 1e300}, "cannot be built"),
    "mlp beyond a storage": ({"mlp_ratio": 1e16}, "cannot be built"),
    "words": ({"vocabulary": 2**50}, "words.weight has shape"),
    "channels": ({"out_channels": 2**40}, "head.project"),
}

MEASURE = """
import json, resource, sys, time
from atoll.artifacts import UserError
from atoll.islands.expert import load_expert
found = {}
for name, place in json.loads(sys.argv[1]).items():
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
    try:
        load_expert(place)
        line = "was loaded"
    except UserError as error:
        line = str(error)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    found[name] = line, time.perf_counter() - start, grown / 1024
print(json.dumps(found))
"""


def test_a_card_that_asks_for_a_giant_is_refused_before_anything_is_allocated(expert: Path, tmp_path: Path) -> None:
    """In a process of its own, whose memory nothing else has touched."""
    architecture = json.loads((expert / "expert.json").read_bytes())["architecture"]
    places = {
        name: str(resealed(expert, tmp_path / name, architecture=architecture | change))
        for name, (change, _) in HOSTILE.items()
    }
    out = subprocess.run(
        [sys.executable, "-c", MEASURE, json.dumps(places)], capture_output=True, text=True, check=True
    )
    for name, (line, seconds, mebibytes) in json.loads(out.stdout).items():
        assert any(reason in line for reason in HOSTILE[name][1].split("|")), f"{name}: {line}"
        assert "\n" not in line
        assert seconds < 2
        assert mebibytes < 100


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_weights_that_are_not_float32_are_refused(expert: Path, tmp_path: Path, dtype: torch.dtype) -> None:
    """float32 on disk is the contract; a network must not silently change its precision with its file."""
    weights = load_file(expert / "model.safetensors")
    weights["head.project.bias"] = weights["head.project.bias"].to(dtype)
    with pytest.raises(UserError, match=r"head\.project\.bias is .*save them as float32"):
        load_expert(resealed(expert, tmp_path / "other", weights))


def test_a_file_without_a_network_is_refused(expert: Path, tmp_path: Path) -> None:
    for weights in ({}, {"blocks.": torch.zeros(1)}, {"patches.project.weight": torch.zeros(())}):
        with pytest.raises(UserError, match="ask for another file"):
            load_expert(resealed(expert, tmp_path / f"{len(list(tmp_path.iterdir()))}", weights))
