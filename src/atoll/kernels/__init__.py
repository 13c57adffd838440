"""Optional CUDA kernels (Triton), one function per operation of models/dit.py, which holds the plain formulas.

A network uses them where its modules have `fused` set (models/kernel_check.py); they are off otherwise.
"""

from .attention import attend, can_attend
from .launch import available
from .norms import gated_add, norm_modulate

__all__ = ["attend", "available", "can_attend", "gated_add", "norm_modulate"]
