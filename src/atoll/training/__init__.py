"""The training loop and what it is made of: recipe, execution, feed, step, state, checkpoints, teams."""
