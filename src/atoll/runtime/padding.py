"""Batches in sizes that give every row the same bits, whatever company it has.

CPU matrix kernels sum products of one to three rows in another order than of four or more, and vector loops end in a
scalar tail. Padded to a multiple of 4 rows, an image's result does not depend on the other rows (tests/runtime).
On CUDA, graphs pad to a few sizes for the same reason (graphs.py).
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..diffusion import Condition

MULTIPLE = 4


def padded_rows(
    x: Tensor, t: Tensor, condition: Condition | None, rows: Tensor | None = None
) -> tuple[Tensor, Tensor, Condition | None]:
    """Some rows of a batch (None: all), the last one repeated until their number is a multiple of 4."""
    count = len(x) if rows is None else len(rows)
    missing = -count % MULTIPLE
    if missing:
        rows = torch.arange(count, device=x.device) if rows is None else rows
        rows = torch.cat([rows, rows[-1:].expand(missing)])
    if rows is None:
        return x, t, condition
    return x[rows], t[rows], None if condition is None else condition[rows]
