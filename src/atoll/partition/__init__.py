"""Partition: clustering methods, assignment, cluster shards and report. Imports nothing itself: faiss is heavy."""
