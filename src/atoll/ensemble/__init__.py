"""Many experts as one denoiser: routes and the mixture."""

from .asking import AskedEvery, Router
from .mixture import Mixture
from .routes import Fixed, Full, Nucleus, Oracle, Route, Sampled, Threshold, TopK, parse_route

__all__ = [
    "AskedEvery",
    "Fixed",
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
