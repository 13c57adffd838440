"""Classes by name: what a prompt asks for, and the line where it asks for none or several."""

from __future__ import annotations

import pytest

from atoll.artifacts import UserError
from atoll.data.classes import class_number, class_title

NAMES = ("hot dog", "dog", "tabby-cat", "Siamese_cat", "7", "sled dog", "dog sled", "tench, Tinca tinca")
UNICODE = ("Äpfel & Birnen", "東京 タワー", "old car")


def test_a_prompt_finds_its_class() -> None:
    prompts = {"hot dog": 0, "dog": 1, "a photo of a dog": 1, "Tabby Cat": 2, "siamese": 3, "tench": 7, 7: 7, "6": 6}
    prompts["a picture of the siamese cat"] = 3
    prompts["7"] = 4  # a class called 7, and not the eighth
    prompts["dog sled"] = 6  # as it is written, though another has the same words
    assert {prompt: class_number(prompt, len(NAMES), NAMES) for prompt in prompts} == prompts
    prompts = {"äpfel": 0, "Äpfel & Birnen": 0, "äpfel birnen": 0, "タワー": 1, "東京 タワー": 1, "a photo of a car": 2}
    assert {prompt: class_number(prompt, 3, UNICODE) for prompt in prompts} == prompts


@pytest.mark.parametrize(
    ("prompt", "line"),
    [
        ("cat", r"fits 2 classes, tabby-cat \(2\), Siamese_cat \(3\); write one whole, or its number"),
        ("a dog and a cat", r"no class of this model; .*known are: hot dog, dog"),
        ("tabbi-cat", r"no class of this model; did you mean tabby-cat\? known are"),
        ("a", "no class of this model"),
        ("", "no class of this model"),
        ("8", "knows the classes 0 to 7, hot dog to tench, Tinca tinca"),
        (-1, "knows the classes 0 to 7"),
    ],
)
def test_none_or_several_is_one_line(prompt: str | int, line: str) -> None:
    with pytest.raises(UserError, match=line) as raised:
        class_number(prompt, len(NAMES), NAMES)
    assert "\n" not in str(raised.value)


def test_every_title_is_a_prompt_for_its_class() -> None:
    assert [class_number(class_title(n, NAMES), len(NAMES), NAMES) for n in range(len(NAMES))] == list(range(8))
    assert [class_number(class_title(n, None), 8, None) for n in range(8)] == list(range(8))
    with pytest.raises(UserError, match="reads a class number from 0 to 7; its classes have no names"):
        class_number("cat", 8, None)


def test_an_untrusted_name_moves_no_cursor() -> None:
    with pytest.raises(UserError) as raised:
        class_number("dog", 2, ("evil\x1b[2J\nname", "x" * 500))
    assert str(raised.value).isprintable()
    assert len(str(raised.value)) < 300
