"""Data: sources, encoding, shards, index and the stream of samples.

Nothing is imported here: an island needs the shards and the stream, and must not need what an organizer has installed.
"""
