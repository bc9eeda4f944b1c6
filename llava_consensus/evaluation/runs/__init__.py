"""Runs: a configuration is checked, its questions are asked, and what came back survives a kill.

These are the places a run is about where nobody says otherwise, relative to the folder one works in.
"""

MODEL, DATA, OUT = "checkpoints/llava-mini", "playground/mini", "results"
