"""How the kernels are launched: Triton where there is one, as operators that torch.compile sees through."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

try:  # torch brings Triton in its CUDA builds only
    import triton
    import triton.language as tl
except ImportError:
    triton = tl = None

__all__ = ["HALF_TYPES", "available", "kernel", "operator", "power_of_two", "tl", "triton", "wrap_triton"]

HALF_TYPES = (torch.bfloat16, torch.float16)
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # Triton runs on the CPU, slowly: for tests


def available(x: Tensor) -> bool:
    """Whether kernels can read this tensor: in half precision, on CUDA. float32 is left to torch."""
    return triton is not None and (x.is_cuda or INTERPRETED) and x.dtype in HALF_TYPES


def kernel(function: Callable[..., Any]) -> Any:
    """triton.jit, or the function itself where there is no Triton and nothing will launch it."""
    return function if triton is None else triton.jit(function)


def operator(name: str) -> Callable[[Callable[..., Any]], Any]:
    """Make a function that launches kernels an operator of torch, which torch.compile sees through."""
    if triton is None:
        return lambda function: function
    return torch.library.triton_op(f"atoll::{name}", mutates_args=())


def wrap_triton(compiled: Any) -> Any:
    """torch's, which makes a launch traceable; the interpreter's kernels (in tests) cannot be traced.

    Keep the name, and call it on a kernel's name: torch reads the operators' source to find the kernels they use.
    """
    traceable = isinstance(compiled, triton.runtime.jit.JITFunction)
    wrapped = torch.library.wrap_triton(compiled) if traceable else compiled
    return OnItsDevice(compiled) if wrapped is compiled else wrapped


@dataclass(frozen=True)
class OnItsDevice:
    """A kernel that runs where its tensors are. Triton launches on the current device, which may be another."""

    compiled: Any

    def __getitem__(self, programs: tuple[int]) -> Callable[..., None]:
        def launch(**arguments: Any) -> None:
            device = next(value.device for value in arguments.values() if isinstance(value, Tensor))
            with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
                self.compiled[programs](**arguments)

        return launch


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << (n - 1).bit_length()
