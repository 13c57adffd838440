"""Sources of images: the built-in digits; folders, tars, parquet and Hugging Face data sets. Plugins add others."""

from . import folder, webdataset, tables, digits  # noqa: F401, I001, each registers itself; where files share a stem, the first counts
from .source import *  # noqa: F403
