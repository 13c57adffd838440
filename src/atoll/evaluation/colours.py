"""The colour of each expert, in every figure, page and sheet."""

from __future__ import annotations

# one colour per expert, told apart by people with any colour vision (Okabe and Ito); beyond eight they repeat
PALETTE = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#F0E442", "#8C564B")


def expert_colour(k: int) -> str:
    return PALETTE[k % len(PALETTE)]
