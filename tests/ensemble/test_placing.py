"""Where experts go: what fits, what is said of it, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from atoll.artifacts import UserError
from atoll.ensemble.placing import Placement, choose, load_alone, small_question
from atoll.ensemble.residency import UnreadableExperts
from atoll.ensemble.weights import Layout, layout_of
from atoll.model import placement_of
from atoll.models import fused
from atoll.models.dit import DiT, DiTConfig
from atoll.models.presets import preset
from atoll.training.trust import answering_disagreements
from tiny_experts import write_experts

XL = preset("xl/2", latent=(4, 32, 32), condition="tokens", text_width=768, text_length=77)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def eight() -> list[Layout]:
    return [layout_of(XL, "bfloat16")] * 8


def test_an_xl2_takes_what_its_weights_take(eight: list[Layout]) -> None:
    assert 1.12 * 2**30 < eight[0].nbytes < 1.14 * 2**30  # 607M of two bytes
    assert 0.5 < layout_of(XL, "bfloat16", int8=True).nbytes / eight[0].nbytes < 0.53


def test_all_of_them_or_as_many_as_there_is_room_for(eight: list[Layout]) -> None:
    assert choose(eight, Placement()) == (8, "8 experts in bfloat16, 9.0 GiB: all on cpu (its memory)")
    assert choose(eight, Placement(memory=10.0)) == (8, "8 experts in bfloat16, 9.0 GiB: all on cpu (--memory 10GB)")
    count, said = choose(eight, Placement(memory=2.5))
    assert count == 2
    assert said == (
        "8 experts in bfloat16, 9.0 GiB: room for 2 at a time on cpu (--memory 2.5GB); images go on with an expert "
        "that is there while the next one comes"
    )
    assert choose(eight, Placement(devices=(CPU, CPU), memory=2.5))[0] == 4, "on each of two"
    assert choose(eight[:1], Placement())[1] == "1 expert in bfloat16, 1.1 GiB: on cpu (its memory)"
    narrow = [layout_of(XL, "bfloat16", int8=True)] * 8
    assert choose(narrow, Placement(memory=2.5, int8=True))[0] == 4
    refusal = r"^--memory 1GB: an expert in bfloat16 takes 1.1 GiB .*; use --weights int8, more"
    with pytest.raises(UserError, match=refusal):
        choose(eight, Placement(memory=1.0))


def test_the_largest_decides_who_has_room(eight: list[Layout]) -> None:
    small = layout_of(preset("s/2", latent=(4, 32, 32)), "bfloat16")
    assert choose([*[small] * 7, eight[0]], Placement(memory=1.2))[0] == 1


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"weights": "int4"}, "--weights int4: use int8"),
        ({"memory": "a lot"}, "--memory a lot: write it in gigabytes"),
        ({"device": "cuda:7,cuda:9"}, "--device cuda:7: this machine has none"),
        ({"device": "gpu"}, "--device gpu: no such kind of device"),
    ],
)
def test_mistakes_are_one_line(given: dict[str, str], line: str) -> None:
    with pytest.raises(UserError, match=line):
        placement_of(**{"device": "cpu", "memory": None, "weights": None, **given})


def test_an_expert_alone_has_a_place_too(tmp_path: Path) -> None:
    (place,) = write_experts(tmp_path, 1)
    alone = load_alone(place)
    assert alone.placed.said.startswith("1 expert in float32, ")
    single = alone.placed.engine("float32")
    assert alone.placed.engine("float32") is single, "kept"
    assert alone.placed.engine("bfloat16") is not single
    path = place / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\1")
    with pytest.raises(UnreadableExperts, match="corrupt"):
        load_alone(place)


CONDITIONS: list[dict[str, object]] = [
    {"condition": "none"},
    {"condition": "labels", "classes": 3},
    {"condition": "words", "vocabulary": 9, "text_length": 4},
    {"condition": "pooled", "text_width": 12},
    {"condition": "tokens", "text_width": 12, "text_length": 5},
]


@pytest.mark.parametrize("how", CONDITIONS, ids=lambda how: how["condition"])
def test_kernels_are_asked_before_experts_use_them(how: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain functions stand in for the kernels: right ones are trusted, wrong ones found, and none is left on."""
    config = DiTConfig(latent=(4, 8, 8), patch=2, width=32, depth=1, heads=2, **how)  # type: ignore[arg-type]
    network = DiT(config, torch.Generator().manual_seed(0)).bfloat16().eval()
    x, time, condition = small_question(config, CPU)
    monkeypatch.setattr(fused, "available", lambda h: fused.Switch.on)
    monkeypatch.setattr(fused, "attends", lambda *_: False)
    monkeypatch.setattr(fused, "ends_in_gelu", lambda x: fused.Switch.on)
    monkeypatch.setattr(
        fused,
        "norm_modulate",
        lambda h, shift, scale, eps: torch.nn.functional.layer_norm(h, h.shape[-1:], eps=eps) * (1 + scale) + shift,
    )
    monkeypatch.setattr(fused, "gated_add", lambda h, gate, branch: h + gate * branch)
    monkeypatch.setattr(
        fused,
        "add_norm_modulate",
        lambda h, branch, gate, shift, scale, eps: (
            (total := h + (branch if gate is None else gate * branch)),
            fused.norm_modulate(total, shift, scale, eps),
        ),
    )

    def linear_gelu(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.gelu(torch.nn.functional.linear(x, weight, bias), approximate="tanh")

    monkeypatch.setattr(fused, "linear_gelu", linear_gelu)

    def wrong() -> dict[str, float]:
        return answering_disagreements(network, lambda: network(x, time, condition))

    assert wrong() == {}
    monkeypatch.setattr(fused, "linear_gelu", lambda x, weight, bias: 1.3 * linear_gelu(x, weight, bias))
    assert "what a block adds" in wrong()
    assert not fused.Switch.on
