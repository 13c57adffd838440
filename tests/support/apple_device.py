"""A stand-in for Apple's GPU: a device that computes on the CPU and, like that GPU, has no float64.

Tensors on it are wrappers around CPU tensors, so values, shapes, control flow and gradients are real. It answers to
torch's name `meta`: torch without Apple's libraries cannot slice or differentiate a tensor that says `mps`. What it
does not show: which operations the real device lacks, its fused optimizers, autocast, memory and speed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map_only

APPLE = torch.device("meta")
MAY_MIX_DEVICES = ("aten.copy_", "aten.index.", "aten.index_put")  # as on a real one


class NoFloat64(RuntimeError):
    """Something wider than float32 was made on, or moved to, the stand-in."""


class AppleTensor(Tensor):
    """A CPU tensor that says it is elsewhere."""

    @staticmethod
    def __new__(cls, inner: Tensor) -> AppleTensor:
        if inner.dtype in (torch.float64, torch.complex128):
            raise NoFloat64(f"{inner.dtype} {list(inner.shape)} on a device without it")
        return torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined, no-any-return]
            cls, inner.shape, inner.stride(), inner.storage_offset(), dtype=inner.dtype, device=APPLE
        )

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    def __repr__(self) -> str:  # type: ignore[override]
        return f"AppleTensor({self.inner!r})"

    def tolist(self) -> Any:  # torch refuses it for subclasses
        return self.inner.tolist()

    @classmethod
    def __torch_dispatch__(
        cls, operation: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        return compute(operation, args, kwargs or {})


class AppleDevice(TorchDispatchMode):
    """Within it tensors can be made on, or moved to, the stand-in."""

    def __torch_dispatch__(
        self, operation: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        return compute(operation, args, kwargs or {})


def compute(operation: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run one operation on the CPU; its results are elsewhere if it was told so or, untold, if an argument is."""
    asked = kwargs.get("device")
    elsewhere = any(isinstance(leaf, AppleTensor) for leaf in tree_leaves((args, kwargs)))
    if asked is not None:
        elsewhere = torch.device(asked).type == APPLE.type
    inside_args, inside = tree_map_only(AppleTensor, lambda tensor: tensor.inner, (tuple(args), dict(kwargs)))
    if asked is not None:
        inside["device"] = torch.device("cpu")
    if asked is not None and "copy" in str(operation):  # from device to device it is never the same tensor
        inside_args = tree_map_only(Tensor, torch.clone, inside_args)
    answer = operation(*inside_args, **inside)
    if not elsewhere:
        return answer
    left_behind = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor) and t.device != APPLE and t.ndim]
    if left_behind and asked is None and not any(word in str(operation) for word in MAY_MIX_DEVICES):
        raise RuntimeError(f"{operation}: a tensor {list(left_behind[0].shape)} was left on the CPU")
    wrapped = tree_map_only(Tensor, AppleTensor, answer)
    return return_and_correct_aliasing(operation, args, kwargs, wrapped)
