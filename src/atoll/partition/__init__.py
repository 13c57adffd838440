"""Partition: clustering, assignment and contact sheets."""

from .config import PartitionConfig
from .stage import partition

__all__ = ["PartitionConfig", "partition"]
