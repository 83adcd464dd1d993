"""Latencies of networks: they are measured, stored in tables, and predicted with an interval."""
