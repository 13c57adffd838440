"""Other people's checkpoints: in, out, and as a warm start. Key by key, and nothing silently."""
