"""Measurements, not tests: what to run and how to read it is in benchmarks/README.md."""
