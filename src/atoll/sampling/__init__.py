"""Time grids, solvers and the engine that runs them. Sees the denoiser protocol only, not experts."""

from .engine import Engine, generate, stream
from .noise import image_seeds
from .protocols import Route, Routed
from .requests import Request, Step
from .settings import Sampling
from .solvers import SOLVERS

__all__ = ["SOLVERS", "Engine", "Request", "Route", "Routed", "Sampling", "Step", "generate", "image_seeds", "stream"]
