"""Fronts: make finalists, score and time them in the deployment runtime, compare and report them."""
