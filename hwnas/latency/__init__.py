"""Latency: measured, kept in tables, predicted with an interval."""
