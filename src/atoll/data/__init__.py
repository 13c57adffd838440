"""Data: sources, encoding, shards, index and sample order."""

from .engine import Engine, Local
from .index import Index
from .prepare import PrepareConfig, prepare
from .shards import ShardSet
from .space import LatentSpace, TextSpace
from .stream import sample_order
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
