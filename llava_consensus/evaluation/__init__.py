"""Measuring: benchmarks, scorers, runs and their tables, on the public functions of the core alone."""
