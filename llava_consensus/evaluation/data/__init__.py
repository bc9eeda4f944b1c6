"""Data from outside: official files of benchmarks (sources, transfer, unpack), and the embedded model (mini)."""
