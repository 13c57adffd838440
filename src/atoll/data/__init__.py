"""Data: sources, encoding, shards, index and sample order."""

from .engine import Engine, Local
from .index import Index
from .order import sample_order
from .prepare import PrepareConfig, prepare
from .shards import ShardSet
from .space import LatentSpace, TextSpace
from .text import Words

__all__ = [
    "Engine",
    "Index",
    "LatentSpace",
    "Local",
    "PrepareConfig",
    "ShardSet",
    "TextSpace",
    "Words",
    "prepare",
    "sample_order",
]
