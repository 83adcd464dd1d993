"""Architectures stand in `hwnas.space.architecture`; cards of earlier versions import this name."""

