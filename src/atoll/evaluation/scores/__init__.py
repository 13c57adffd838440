"""Scores of a set of generated images. Every file here that has a function with `@score` adds a number to all tables.

A score is a function of `Sets` to one number. None of them makes an N x N matrix: what is compared with everything is
compared in parts.
"""

from __future__ import annotations

import pkgutil
from importlib import import_module

from .estimate import Estimate
from .sets import SCORES, Real, Sets, as_json, number_written, score, score_table, scored

FIRST = ("class_accuracy", "fd", "kid")  # the columns that tables begin with

for _name in sorted((module.name for module in pkgutil.iter_modules(__path__)), key=lambda n: (n not in FIRST, n)):
    import_module(f"{__name__}.{_name}")

__all__ = ["SCORES", "Estimate", "Real", "Sets", "as_json", "number_written", "score", "score_table", "scored"]
