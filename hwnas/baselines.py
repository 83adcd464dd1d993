"""Baselines stand in `hwnas.networks.baselines`; cards of earlier versions import this name."""

