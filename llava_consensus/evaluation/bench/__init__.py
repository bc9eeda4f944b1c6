"""What a method costs on a machine: time, memory and dispatched operations, measured side by side in one process.

timing answers a picture once with the clock running; memory says what is used and refuses what does not fit;
efficiency takes turns over methods and budgets and keeps the file of results, whose rows summary makes; operations
counts what is dispatched; growth measures methods alone on random features.
"""
