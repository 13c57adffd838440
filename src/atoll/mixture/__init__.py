"""Many experts as one denoiser: routes, the mixture, missing experts."""

from .mixture import Denoisers, Experts, Mixture, RouterFunction
from .routes import Fixed, Full, Threshold, TopK, parse_route

__all__ = ["Denoisers", "Experts", "Fixed", "Full", "Mixture", "RouterFunction", "Threshold", "TopK", "parse_route"]
