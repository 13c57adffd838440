"""A crawl holds everything. Nothing may be lost, nothing silent, nothing fatal."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from atoll.artifacts import UserError
from atoll.data.config import PrepareConfig
from atoll.data.images import BadImage, to_pixels
from atoll.data.prepare import prepare
from atoll.data.sources import Example, open_source
from hostile_images import SIZE, corpus, encoded, picture
from image_forms import FORMS, Item


@pytest.mark.parametrize("form", FORMS)
def test_every_input_is_decoded_or_skipped_with_its_reason(form: str, tmp_path: Path) -> None:
    """In the form of every source: the example has the bytes of the input, and decoding decides."""
    inputs = corpus()
    assert len(inputs) >= 60
    opened = open_source(FORMS[form](tmp_path / "source", [Item(i.name, i.content) for i in inputs]))
    reasons: dict[bytes, str | None] = {}
    for found in (found for item in opened.list() for found in opened.read(item)):
        assert isinstance(found, Example)
        assert isinstance(found.content, bytes)
        try:
            assert to_pixels(found.content, SIZE, 3, SIZE // 2).shape == (3, SIZE, SIZE)
            reasons[found.content] = None
        except BadImage as bad:
            reasons[found.content] = bad.reason
    assert reasons == {i.content: i.reason for i in inputs}


def test_nothing_usable_is_one_line(tmp_path: Path) -> None:
    place = FORMS["folder"](tmp_path / "source", [Item(i.name, i.content) for i in corpus() if i.reason])
    with pytest.raises(UserError, match=r"none of its images can be used; the first one, .*: "):
        prepare(place, tmp_path / "data", PrepareConfig(size=SIZE, features="pixels"))
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def pixels(content: bytes, size: int = SIZE) -> np.ndarray:
    return to_pixels(content, size, 3, 1).astype(int)


def test_exif_turns_the_picture() -> None:
    array = picture(1, 40, 40)
    exif = Image.Exif()
    exif[0x0112] = 6  # turn by 90 degrees clockwise
    turned = pixels(encoded(array, "PNG", exif=exif.tobytes()), 40)
    np.testing.assert_array_equal(turned, np.rot90(array, -1).transpose(2, 0, 1))


def test_sixteen_bits_are_scaled_not_clipped() -> None:
    grey = picture(2, 40, 40, 1)
    wide = pixels(encoded(grey.astype(np.uint16) * 257, "PNG"), 40)
    np.testing.assert_array_equal(wide[0], grey)


def test_animation_gives_its_first_frame() -> None:
    frames = [Image.fromarray(picture(i, 40, 40)) for i in range(3)]
    moving = pixels(encoded(frames[0], "PNG", save_all=True, append_images=frames[1:]), 40)
    np.testing.assert_array_equal(moving, picture(0, 40, 40).transpose(2, 0, 1))


def test_transparent_is_laid_on_white() -> None:
    clear = np.zeros((40, 40, 4), np.uint8)
    assert (pixels(encoded(clear, "PNG"), 40) == 255).all()


def test_cmyk_keeps_its_colors() -> None:
    array = picture(3, 40, 40)
    back = pixels(encoded(Image.fromarray(array).convert("CMYK"), "TIFF"), 40)
    assert abs(back - array.transpose(2, 0, 1)).max() <= 1


def test_resizing_takes_the_middle_and_does_not_alias() -> None:
    # a one-pixel checkerboard is grey when seen from afar; picking single pixels would give black or white
    board = (np.indices((256, 512)).sum(0) % 2 * 255).astype(np.uint8)
    middle = pixels(encoded(np.dstack([board] * 3), "PNG"), 32)
    assert abs(middle[:, 4:-4, 4:-4] - 127.5).max() < 3
    # the middle square of three colors side by side is the middle one
    stripes = np.zeros((40, 120, 3), np.uint8)
    for third in range(3):
        stripes[:, 40 * third : 40 * third + 40, third] = 255
    assert (pixels(encoded(stripes, "PNG"), 40) == np.array([0, 255, 0])[:, None, None]).all()
