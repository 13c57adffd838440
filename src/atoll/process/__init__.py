"""The maths of the diffusion process: tensors in, tensors out. Imports torch only."""

from .bridge import Bridge, PaperFusion
from .condition import Condition
from .denoiser import Denoiser, GuidedDenoiser, NetworkDenoiser, PerImageDenoiser, guide
from .objective import (
    AnySchedule,
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
from .prediction import Kind, Prediction, combine, convert, pair, x0_gain
from .schedule import EDM, CosineVP, DDPMBetas, LinearFlow, Schedule, per_sample, wide_dtype, widen

__all__ = [
    "EDM",
    "AnySchedule",
    "Bridge",
    "Condition",
    "CosineVP",
    "DDPMBetas",
    "Denoiser",
    "GuidedDenoiser",
    "Kind",
    "LinearFlow",
    "LogitNormal",
    "MinSNR",
    "NetworkDenoiser",
    "Objective",
    "PaperFusion",
    "PerImageDenoiser",
    "Plain",
    "Prediction",
    "Schedule",
    "Shifted",
    "Sigmoid",
    "TimeDensity",
    "Uniform",
    "Weighting",
    "combine",
    "convert",
    "fixed_times",
    "guide",
    "noisy",
    "pair",
    "per_sample",
    "shift_time",
    "squared_error",
    "velocity_error",
    "wide_dtype",
    "widen",
    "x0_gain",
]
