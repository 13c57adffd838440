"""Time grids, solvers and the engine that runs them. Sees the denoiser protocol only, not experts."""

from .engine import Engine, generate, stream
from .grids import Grid, log_snr, parse_grid, shifted, uniform
from .noise import image_seeds, initial_noise, step_noise
from .protocols import ImageRoute, Residents, Route, Routed
from .requests import Request, Step
from .settings import GuidanceWeights, Precision, Sampling
from .solvers import SOLVERS, GridPath, Solver

__all__ = [
    "SOLVERS",
    "Engine",
    "Grid",
    "GridPath",
    "GuidanceWeights",
    "ImageRoute",
    "Precision",
    "Request",
    "Residents",
    "Route",
    "Routed",
    "Sampling",
    "Solver",
    "Step",
    "generate",
    "image_seeds",
    "initial_noise",
    "log_snr",
    "parse_grid",
    "shifted",
    "step_noise",
    "stream",
    "uniform",
]
