"""Sources of images: the built-in digits; folders, tars, parquet and Hugging Face data sets. Plugins add others."""

# Each module registers its classes. Where files share a stem, the class registered first reads them.
# isort: off
from .folder import Folder as Folder
from .webdataset import WebDataset as WebDataset
from .tables import Arrow as Arrow, Parquet as Parquet
from .digits import Digits as Digits

# isort: on
from .source import (
    END,
    Example,
    Item,
    Items,
    Skipped,
    Source,
    SourceConfig,
    is_built_in,
    open_source,
    row_items,
    source,
)

__all__ = [
    "END",
    "Example",
    "Item",
    "Items",
    "Skipped",
    "Source",
    "SourceConfig",
    "is_built_in",
    "open_source",
    "row_items",
    "source",
]
