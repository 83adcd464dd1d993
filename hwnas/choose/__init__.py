"""The command hwnas choose, which finds the cheapest network for a load."""
