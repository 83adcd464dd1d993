"""The training of networks: recipes, the loop, checkpoints."""
