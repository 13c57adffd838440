"""Partition: features, clustering, assignment and contact sheets."""

from .stage import PartitionConfig, partition

__all__ = ["PartitionConfig", "partition"]
