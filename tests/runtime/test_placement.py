"""Where experts go: what fits, what is said of it, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from atoll.artifacts import UserError
from atoll.data.space import LatentConfig, TextConfig
from atoll.models.dit import DiTConfig
from atoll.models.presets import preset
from atoll.models.router import RouterConfig, build_router
from atoll.router.card import RouterCard, TrainedRouter
from atoll.runtime import placing
from atoll.runtime.placing import Placement, choose, load_single_expert, placement_of
from atoll.runtime.residency import UnreadableExperts
from atoll.runtime.weights import Layout, layout_of
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
        "8 experts in bfloat16, 9.0 GiB: room for 2 at a time on cpu (--memory 2.5GB); images are grouped by the "
        "expert in memory while the next one is copied"
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
    alone = load_single_expert(place)
    assert alone.placed.summary.startswith("1 expert in float32, ")
    single = alone.placed.pool("float32").residency
    assert alone.placed.pool("float32").residency is single, "kept"
    assert alone.placed.pool("bfloat16").residency is not single
    path = place / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\1")
    with pytest.raises(UnreadableExperts, match="corrupt"):
        load_single_expert(place)


def test_text_encoder_and_autoencoder_are_on_a_gpu_before_free_memory_is_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[str] = []

    class Codec:
        def decode(self, latents: torch.Tensor) -> None:
            seen.append(f"decoder {list(latents.shape)}")

    monkeypatch.setattr(placing, "text_encoder", lambda space, device: seen.append(f"text on {device}"))
    monkeypatch.setattr(placing, "load_autoencoder", lambda name: Codec())
    latent = LatentConfig(autoencoder="pixels", shape=(1, 8, 8), mean=(0.0,), scale=(1.0,))
    text = TextConfig(encoder="words", kind="words", length=4, width=None, vocabulary=("a",))
    monkeypatch.setattr(Placement, "is_cuda", True)
    assert isinstance(Placement().with_codecs(latent, text), Placement)
    assert seen == ["text on cpu", "decoder [1, 1, 8, 8]"]


def test_logits_of_a_router_in_bfloat16_are_float32() -> None:
    """With bfloat16 a logit of 10 is wrong by up to 0.02, and top-1 flips near ties."""
    trunk = DiTConfig(latent=(1, 8, 8), patch=2, width=32, depth=1, heads=2)
    config = RouterConfig(trunk=trunk, clusters=4)
    card = RouterCard(
        architecture=config,
        latent=LatentConfig(autoencoder="pixels", shape=(1, 8, 8), mean=(0.0,), scale=(1.0,)),
        partition="0" * 64,
        images=0,
    )
    network = build_router(config, torch.Generator().manual_seed(0)).eval()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.normal_(generator=torch.Generator().manual_seed(1), std=0.1)
    placed = placing.network_of(TrainedRouter(card, network, "0" * 64), "bfloat16", torch.device("cpu"))
    x, t = torch.randn(64, 1, 8, 8), torch.rand(64)
    logits = placed(x, t, None)
    assert logits.dtype == torch.float32
    assert not torch.equal(logits, logits.bfloat16().float())
    torch.testing.assert_close(logits, network(x, t, None), rtol=0.1, atol=0.1)
    assert {p.dtype for p in network.parameters()} == {torch.float32}, "the trained one stays as it is"
