"""Samplers: which network to try next."""
