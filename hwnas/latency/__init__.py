"""Latency: hosts, measurements, tables and the models fitted on them."""
