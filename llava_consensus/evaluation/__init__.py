"""Measuring: benchmarks, scorers, runs and their tables, only on the public functions of the core."""
