"""Costs of a method on a machine: time and memory, measured side by side in one process or of servers."""
