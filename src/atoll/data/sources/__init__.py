"""Sources of images: the built-in digits; folders, tars, parquet and Hugging Face data sets."""

from ...artifacts import UserError
from .digits import Digits
from .sample import Reject, Sample, Source, Unit

__all__ = ["Reject", "Sample", "Source", "Unit", "open_source"]


def open_source(place: str) -> Source:
    """The source a user names on the command line."""
    if place == "digits":
        return Digits()
    raise UserError(f"source {place}: not known; use digits")
