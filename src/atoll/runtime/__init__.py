"""Where experts run: devices, precision, weights files, CUDA graphs, and loading a run's model."""
