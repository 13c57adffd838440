"""Atoll trains one diffusion model on islands of compute that never talk to each other."""

__version__ = "0.1.0"
