"""Which samples come next: a pure function of (seed, images seen), so that resuming needs no stored state."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from torch import Tensor


def sample_order(size: int, seed: int, start: int, count: int) -> Tensor:
    """Rows int64 [count] at places start .. start + count - 1 of an endless stream over `size` rows.

    The stream is one permutation after another, each drawn by a counter-based generator from (seed, epoch), so
    every row comes once per epoch and any place can be reached without walking there.
    """
    if size < 1 or seed < 0 or start < 0 or count < 0:
        raise ValueError(f"need size >= 1 and seed, start, count >= 0, got {size}, {seed}, {start}, {count}")
    rows = np.empty(count, dtype=np.int64)
    done = 0
    while done < count:
        epoch, place = divmod(start + done, size)
        taken = min(size - place, count - done)
        rows[done : done + taken] = _permutation(size, seed, epoch)[place : place + taken]
        done += taken
    return torch.from_numpy(rows)


@lru_cache(maxsize=4)
def _permutation(size: int, seed: int, epoch: int) -> np.ndarray:
    # Philox is keyed, not walked: epochs are independent streams. SeedSequence mixes (seed, epoch) into the key.
    generator = np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, epoch])))
    return generator.permutation(size)
