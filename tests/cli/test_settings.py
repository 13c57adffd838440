"""Numbers as people write them."""

from __future__ import annotations

import pytest

from atoll.artifacts import UserError
from atoll.cli.settings import parse_count


@pytest.mark.parametrize(
    ("text", "count"),
    [("96000", 96_000), ("96_000", 96_000), ("96,000", 96_000), ("2M", 2_000_000), ("1.5k", 1500), ("0.32k", 320)],
)
def test_counts(text: str, count: int) -> None:
    assert parse_count("--images", text) == count


@pytest.mark.parametrize("text", ["", "many", "0", "-3", "1.5", "1.0001k", "nan", "inf", "1e30", "M", "2MM"])
def test_what_is_no_count(text: str) -> None:
    with pytest.raises(UserError, match="give a whole number, such as"):
        parse_count("--images", text)
