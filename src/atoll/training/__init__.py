"""What training loops share: seeds, weight averages, checkpoints, stopping. Holds no loop."""
