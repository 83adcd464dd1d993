"""Samplers, which propose the network to try next."""
