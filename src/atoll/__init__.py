"""Atoll trains one diffusion model on islands of compute that never talk to each other.

import atoll
model = atoll.load("runs/demo")
images = model.generate(["a handwritten seven"], steps=50, guidance=2.0, route="top-2", seed=0)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .artifacts import UserError
    from .model import Model, Sampling, StepInfo, load

__version__ = "0.1.0"
__all__ = ["Model", "Sampling", "StepInfo", "UserError", "__version__", "load"]


def __getattr__(name: str) -> object:
    # torch takes seconds to import; `atoll --help` should not
    if name in __all__:
        from . import model

        return getattr(model, name)
    raise AttributeError(f"module 'atoll' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
