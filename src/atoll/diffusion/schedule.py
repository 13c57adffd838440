"""Noise schedules: how much data and how much noise a state holds at time t.

One convention everywhere: time is continuous, t = 0 is data, t = 1 is noise, and

    x_t = alpha(t) x0 + sigma(t) eps,        eps ~ N(0, I).                      (1)

A schedule is the pair (alpha, sigma) with its derivatives, its log signal-to-noise ratio

    log_snr(t) = log(alpha(t)^2 / sigma(t)^2),                                   (2)

which falls as t grows, the inverse of (2), and the finite `band` of log-SNR it covers. Outside the band a
network trained on the schedule has never seen an input; `time_at` therefore clamps to the band.

Times are one value per sample, shape [B]. All arithmetic here is on such small vectors, so it is done in
float64 whatever the state's precision: 1 - t in bf16 would lose the signal near t = 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor

OPEN_END = 2.0 * math.log(1e4)  # sigma/alpha reaches 0 and infinity on some paths; 1e-4 .. 1e4 counts as covered
BISECTIONS = 60  # halve [0, 1] below float64's resolution
WITHOUT_FLOAT64 = ("mps",)  # device types: Apple's GPUs


def wide_dtype(device: torch.device) -> torch.dtype:
    """The widest float that a device has."""
    return torch.float32 if device.type in WITHOUT_FLOAT64 else torch.float64


def widen(t: Tensor, device: torch.device | None = None) -> Tensor:
    """Times in the widest float of their device, or of the device they are moved to."""
    device = device or t.device
    return t.to(device, wide_dtype(device))


def per_sample(values: Tensor, like: Tensor) -> Tensor:
    """Reshape one value per sample, [B], so that it multiplies a state [B, ...]; refuses any other shape."""
    if values.shape != like.shape[:1]:
        raise ValueError(f"expected one value per sample, shape [{like.shape[0]}], got {list(values.shape)}")
    return values.reshape(-1, *[1] * (like.ndim - 1))


def scaled(x: Tensor, factor: Tensor) -> Tensor:
    """factor x, one factor per sample [B], in float32 or wider [B, ...]."""
    return per_sample(factor, x).to(torch.promote_types(x.dtype, torch.float32)) * x


class Schedule:
    """A path from data to noise, a value: frozen and hashable. Methods map times [B] to float64 values [B].

    A new schedule is a frozen dataclass with `name`, `alpha` and `sigma`, added to AnySchedule at the end of this file.
    Derivatives (autograd), band and inverse (bisection) have defaults; closed forms are faster.
    """

    name: str

    def alpha(self, t: Tensor) -> Tensor:
        raise NotImplementedError

    def sigma(self, t: Tensor) -> Tensor:
        raise NotImplementedError

    def d_alpha(self, t: Tensor) -> Tensor:
        return _slope(self.alpha, t)

    def d_sigma(self, t: Tensor) -> Tensor:
        return _slope(self.sigma, t)

    def log_snr(self, t: Tensor) -> Tensor:
        return 2.0 * (self.alpha(t).log() - self.sigma(t).log())

    @property
    def band(self) -> tuple[float, float]:
        """Lowest and highest log-SNR covered: (noisiest, cleanest)."""
        return _band(self)

    def time_at(self, log_snr: Tensor) -> Tensor:
        """The t with this log-SNR, after clamping the log-SNR to the band."""
        wanted = widen(log_snr).clamp(*self.band)
        low, high = torch.zeros_like(wanted), torch.ones_like(wanted)
        for _ in range(BISECTIONS):
            middle = 0.5 * (low + high)
            cleaner = self.log_snr(middle) > wanted
            low, high = torch.where(cleaner, middle, low), torch.where(cleaner, high, middle)
        return 0.5 * (low + high)

    def input_scale(self, t: Tensor) -> Tensor | None:
        """What the state is multiplied with before it enters a network of this path; None: nothing."""
        return None


@lru_cache(maxsize=64)
def _band(schedule: Schedule) -> tuple[float, float]:
    cleanest, noisiest = schedule.log_snr(torch.tensor([0.0, 1.0], dtype=torch.float64)).tolist()
    return max(noisiest, -OPEN_END), min(cleanest, OPEN_END)


def _slope(function: Callable[[Tensor], Tensor], t: Tensor) -> Tensor:
    """d function / dt at t [B], by autograd."""
    with torch.inference_mode(False), torch.enable_grad():
        at = widen(t).clone().requires_grad_()
        (slope,) = torch.autograd.grad((function(at) + 0.0 * at).sum(), at)  # a constant has slope 0
    return slope


@dataclass(frozen=True)
class LinearFlow(Schedule):
    """Flow matching's straight path, and the sampling path of every ensemble: alpha = 1 - t, sigma = t."""

    name: Literal["linear-flow"] = field(default="linear-flow", kw_only=True)

    def alpha(self, t: Tensor) -> Tensor:
        return 1.0 - widen(t)

    def sigma(self, t: Tensor) -> Tensor:
        return widen(t)

    def d_alpha(self, t: Tensor) -> Tensor:
        return torch.full_like(widen(t), -1.0)

    def d_sigma(self, t: Tensor) -> Tensor:
        return torch.ones_like(widen(t))

    def time_at(self, log_snr: Tensor) -> Tensor:
        # sigma / alpha = t / (1 - t) = exp(-log_snr / 2)
        return torch.sigmoid(-0.5 * widen(log_snr).clamp(*self.band))


@dataclass(frozen=True)
class CosineVP(Schedule):
    """Variance-preserving quarter circle: sigma = sin(pi/2 t), alpha = cos(pi/2 t) = sin(pi/2 (1 - t)).

    The second form of alpha is exact near t = 1, where the cosine of a rounded angle is not.
    """

    name: Literal["cosine-vp"] = field(default="cosine-vp", kw_only=True)

    def alpha(self, t: Tensor) -> Tensor:
        return torch.sin(0.5 * math.pi * (1.0 - widen(t)))

    def sigma(self, t: Tensor) -> Tensor:
        return torch.sin(0.5 * math.pi * widen(t))

    def d_alpha(self, t: Tensor) -> Tensor:
        return -0.5 * math.pi * self.sigma(t)

    def d_sigma(self, t: Tensor) -> Tensor:
        return 0.5 * math.pi * self.alpha(t)

    def time_at(self, log_snr: Tensor) -> Tensor:
        # tan(pi/2 t) = sigma / alpha = exp(-log_snr / 2)
        return torch.atan(torch.exp(-0.5 * widen(log_snr).clamp(*self.band))) * (2.0 / math.pi)


@dataclass(frozen=True)
class DDPMBetas(Schedule):
    """A discrete DDPM made continuous: step i sits at t = i / (steps - 1), log-SNR is linear between steps.

    At the knots alpha^2 is the running product of (1 - beta_i), exactly the table a DDPM was trained with;
    between them alpha^2 = sigmoid(log_snr) and sigma^2 = sigmoid(-log_snr), so alpha^2 + sigma^2 = 1 everywhere.
    """

    betas: Literal["linear", "scaled_linear", "cosine"] = field(metadata={"help": "how noise grows from step to step"})
    steps: int = field(default=1000, metadata={"help": "of the discrete chain"})
    name: Literal["ddpm-betas"] = field(default="ddpm-betas", kw_only=True)

    def __post_init__(self) -> None:
        if self.betas not in ("linear", "scaled_linear", "cosine"):
            raise ValueError(f"betas must be linear, scaled_linear or cosine, got {self.betas!r}")
        if self.steps < 2:
            raise ValueError(f"steps must be at least 2, got {self.steps}")

    @property
    def band(self) -> tuple[float, float]:
        knots = ddpm_log_snr(self.betas, self.steps, torch.device("cpu"))
        return float(knots[-1]), float(knots[0])

    def alpha(self, t: Tensor) -> Tensor:
        return torch.sigmoid(self.log_snr(t)).sqrt()

    def sigma(self, t: Tensor) -> Tensor:
        return torch.sigmoid(-self.log_snr(t)).sqrt()

    def log_snr(self, t: Tensor) -> Tensor:
        position = widen(t).clamp(0.0, 1.0) * (self.steps - 1)
        knots = ddpm_log_snr(self.betas, self.steps, position.device)
        left = position.detach().floor().long().clamp(0, self.steps - 2)
        return knots[left] + (position - left) * (knots[left + 1] - knots[left])

    def time_at(self, log_snr: Tensor) -> Tensor:
        wanted = widen(log_snr).clamp(*self.band)
        knots = ddpm_log_snr(self.betas, self.steps, wanted.device)
        # knots fall with the step, so search in their negatives, which rise
        left = (torch.searchsorted(-knots, -wanted, right=True) - 1).clamp(0, self.steps - 2)
        fraction = (knots[left] - wanted) / (knots[left] - knots[left + 1])
        return (left + fraction) / (self.steps - 1)


@lru_cache(maxsize=64)
def ddpm_log_snr(betas: str, steps: int, device: torch.device) -> Tensor:
    """log-SNR at every step of a DDPM beta table [steps], on a device in its widest float."""
    scale = 1000.0 / steps  # papers give the ends for 1000 steps; other lengths keep the same end noise
    if betas == "linear":  # Ho et al.
        beta = torch.linspace(1e-4 * scale, 0.02 * scale, steps, dtype=torch.float64)
    elif betas == "scaled_linear":  # Stable Diffusion
        beta = torch.linspace((0.00085 * scale) ** 0.5, (0.012 * scale) ** 0.5, steps, dtype=torch.float64) ** 2
    else:  # Nichol and Dhariwal's cosine table, each beta capped at 0.999
        edges = torch.arange(steps + 1, dtype=torch.float64) / steps
        bar = torch.cos((edges + 0.008) / 1.008 * math.pi / 2) ** 2
        beta = (1.0 - bar[1:] / bar[:-1]).clamp(max=0.999)
    if not bool(((beta > 0) & (beta < 1)).all()):
        raise ValueError(f"a {betas} table of {steps} steps has a beta outside (0, 1); use more steps")
    log_signal = torch.log1p(-beta).cumsum(0)  # log alpha^2
    return widen(log_signal - torch.log(-torch.expm1(log_signal)), device)


@dataclass(frozen=True)
class VE(Schedule):
    """A variance-exploding path: alpha = 1, sigma = (s0 + t (s1 - s0))^rho, from sigma_min to sigma_max.

    Its spacing of sigma and its input scale are those of VE (Karras et al.); with kind `v` a network also has VE's
    output preconditioning. VE's density of noise levels and its loss weights are not part of it.
    """

    sigma_min: float = field(default=0.002, metadata={"help": "noise at t = 0"})
    sigma_max: float = field(default=80.0, metadata={"help": "noise at t = 1"})
    rho: float = field(default=7.0, metadata={"help": "how much of the time goes to little noise"})
    name: Literal["ve"] = field(default="ve", kw_only=True)

    def __post_init__(self) -> None:
        if not 0.0 < self.sigma_min < self.sigma_max:
            raise ValueError(f"need 0 < sigma_min < sigma_max, got {self.sigma_min} and {self.sigma_max}")
        if not self.rho > 0.0:
            raise ValueError(f"rho must be positive, got {self.rho}")

    @property
    def _roots(self) -> tuple[float, float]:
        low, high = self.sigma_min ** (1 / self.rho), self.sigma_max ** (1 / self.rho)
        return low, high - low

    @property
    def band(self) -> tuple[float, float]:
        return -2.0 * math.log(self.sigma_max), -2.0 * math.log(self.sigma_min)

    def alpha(self, t: Tensor) -> Tensor:
        return torch.ones_like(widen(t))

    def sigma(self, t: Tensor) -> Tensor:
        low, rise = self._roots
        return (low + widen(t) * rise) ** self.rho

    def time_at(self, log_snr: Tensor) -> Tensor:
        low, rise = self._roots
        return (torch.exp(-0.5 * widen(log_snr).clamp(*self.band) / self.rho) - low) / rise

    def input_scale(self, t: Tensor) -> Tensor:
        """VE's c_in for data of standard deviation 1, as latents are: the network sees variance 1."""
        return 1.0 / torch.hypot(self.alpha(t), self.sigma(t))


AnySchedule = LinearFlow | CosineVP | DDPMBetas | VE
