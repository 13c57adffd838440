"""Many experts as one denoiser: routes and the mixture."""

from .mixture import Mixture, Router
from .routes import Full, Nucleus, Oracle, Route, Sampled, Threshold, TopK, parse_route

__all__ = [
    "Full",
    "Mixture",
    "Nucleus",
    "Oracle",
    "Route",
    "Router",
    "Sampled",
    "Threshold",
    "TopK",
    "parse_route",
]
