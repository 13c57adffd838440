"""The maths of the diffusion process: tensors in, tensors out. Imports torch only."""

from .bridge import Bridge
from .condition import Condition, NegativeCondition
from .denoiser import Denoiser, NetworkDenoiser
from .objective import (
    LogitNormal,
    MinSNR,
    Objective,
    Plain,
    Shifted,
    Sigmoid,
    TimeDensity,
    Uniform,
    Weighting,
    fixed_times,
    noisy,
    shift_time,
    squared_error,
    velocity_error,
)
from .prediction import Kind, Prediction, coefficients, combine, convert, is_noise_only, mix, recombine, x0_gain
from .schedule import VE, AnySchedule, CosineVP, DDPMBetas, LinearFlow, Schedule, per_sample, wide_dtype, widen

__all__ = [
    "VE",
    "AnySchedule",
    "Bridge",
    "Condition",
    "CosineVP",
    "DDPMBetas",
    "Denoiser",
    "Kind",
    "LinearFlow",
    "LogitNormal",
    "MinSNR",
    "NegativeCondition",
    "NetworkDenoiser",
    "Objective",
    "Plain",
    "Prediction",
    "Schedule",
    "Shifted",
    "Sigmoid",
    "TimeDensity",
    "Uniform",
    "Weighting",
    "coefficients",
    "combine",
    "convert",
    "fixed_times",
    "is_noise_only",
    "mix",
    "noisy",
    "per_sample",
    "recombine",
    "shift_time",
    "squared_error",
    "velocity_error",
    "wide_dtype",
    "widen",
    "x0_gain",
]
