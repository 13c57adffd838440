"""Scores of a set of generated images. One file per score, found by being here; reports and tables list them all.

A score is a function of `Sets`, features on any device, to named numbers. None of them makes an N x N matrix: what is
compared with everything is compared in parts.
"""

from __future__ import annotations

import pkgutil
from importlib import import_module

from .sets import (
    SCORES,
    Score,
    Sets,
    number_title,
    number_written,
    other_numbers,
    score,
    scored,
    with_intervals,
)

for _module in pkgutil.iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")

__all__ = [
    "SCORES",
    "Score",
    "Sets",
    "number_title",
    "number_written",
    "other_numbers",
    "score",
    "scored",
    "with_intervals",
]
