"""Deployment runtimes: they compile a file for a target, run it and report what was executed."""
