"""Deployment runtimes: a file compiled for a target, run, and asked what it executed."""
