"""Costs of a method on a machine: time and memory, measured side by side in one process.

timing answers a picture once with the clock running, says how much memory is used and refuses what does not fit;
efficiency takes turns over methods and budgets and keeps the file of results; serving measures vLLM under requests.
"""
