"""Time grids, solvers, guidance, painting. Sees the Denoiser protocol only; does not know experts exist."""

from .generate import generate, stream
from .grids import Grid, log_snr, parse_grid, shifted, uniform
from .guidance import Guided
from .noise import image_seeds, initial_noise, step_noise
from .settings import Precision, Sampling
from .solvers import SOLVERS, Solver, Step, dpmpp_2m, euler, heun, parse_solver, stochastic

__all__ = [
    "SOLVERS",
    "Grid",
    "Guided",
    "Precision",
    "Sampling",
    "Solver",
    "Step",
    "dpmpp_2m",
    "euler",
    "generate",
    "heun",
    "image_seeds",
    "initial_noise",
    "log_snr",
    "parse_grid",
    "parse_solver",
    "shifted",
    "step_noise",
    "stochastic",
    "stream",
    "uniform",
]
