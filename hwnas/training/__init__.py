"""Training: recipes, the loop, checkpoints."""
