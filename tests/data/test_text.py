"""Words, captions and splits."""

from __future__ import annotations

import hashlib

import pytest

from atoll.artifacts import UserError
from atoll.data.captions import from_fields, from_json, from_label, from_text
from atoll.data.index import split_of
from atoll.data.text import Words, split_words, words_space


def test_words_are_ids_of_a_sorted_vocabulary() -> None:
    words = Words(words_space(["three a", "A handwritten seven"]))
    assert words.space.vocabulary == ("a", "handwritten", "seven", "three")
    assert words.space.length == 3
    encoded = words.encode(["three", "a SEVEN", ""])
    assert encoded["tokens"].tolist() == [[3, 0, 0], [0, 2, 0], [0, 0, 0]]
    assert encoded["mask"].tolist() == [[True, False, False], [True, True, False], [False] * 3]


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ("a handwritten 7", "unknown word '7'; known are: a, handwritten, seven"),
        ("a handwritten sevn", r"unknown word 'sevn'; did you mean seven\? known are: a, handwritten, seven"),
        ("a handwritten eleven", r"unknown word 'eleven'; did you mean seven\? known are"),
        ("a a a a seven", "5 words, the model takes at most 3"),
    ],
)
def test_a_prompt_the_model_cannot_read_is_one_line(prompt: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        Words(words_space(["a handwritten seven"])).encode([prompt])


def test_a_huge_vocabulary_is_refused() -> None:
    with pytest.raises(UserError, match="use a pretrained text encoder"):
        words_space(f"word{i}" for i in range(70_000))


def test_words_of_any_script() -> None:
    assert split_words("L'été, 猫 — Straße 42") == ["l'été", "猫", "straße", "42"]


def test_what_people_write_about_images() -> None:
    assert from_text(b"\xef\xbb\xbfone\r\n\r\n two  words \n").captions == ("one", "two words")
    assert from_text(b"\xff\xff").warnings == ("bad caption: not UTF-8",)
    assert from_json(b'{"caption": ["a", "b"], "text": "a", "label": 3}').captions == ("a", "b")
    assert from_json(b"[1]").warnings == ("bad caption: not a JSON object",)
    assert from_json(b"[" * 100_000).warnings == ("bad caption: not JSON",)
    bad_captions = {7: "not text", "x" * 20_000: "longer than 10000 characters", "a\0b": "not UTF-8"}
    for bad, reason in bad_captions.items():
        assert from_fields({"text": bad}).warnings == (f"bad caption: {reason}",)
    assert from_label(b" 12\n").label == 12
    for label in (-1, True, 1.5, "cat", b"1", 2**40):
        assert from_fields({"label": label}).warnings == ("bad label: not a whole number from 0",)
    assert from_label(b"cat").warnings == from_label(b"").warnings == ("bad label: not a whole number from 0",)
    both = from_fields({"label": 1, "cls": 2})
    assert both.label is None
    assert both.warnings == ("bad label: two labels for one image",)
    assert (both + from_label(b"2")).label is None, "a third one does not settle it"


def test_splits_are_a_property_of_the_sample() -> None:
    ids = [hashlib.sha256(str(i).encode()).digest() for i in range(20_000)]
    splits = [split_of(identity, 0.1, 0.05) for identity in ids]
    assert splits.count("validation") == pytest.approx(2000, rel=0.1)
    assert splits.count("holdout") == pytest.approx(1000, rel=0.15)
    # more validation takes from training only: nobody leaves the holdout
    wider = [split_of(identity, 0.3, 0.05) for identity in ids]
    assert all((a == "holdout") == (b == "holdout") for a, b in zip(splits, wider, strict=True))
    # the split says nothing about where in the order of ids a sample stands
    low = [s for identity, s in zip(ids, splits, strict=True) if identity[0] < 128]
    assert low.count("holdout") / len(low) == pytest.approx(0.05, abs=0.01)
