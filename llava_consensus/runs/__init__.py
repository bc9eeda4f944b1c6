"""Runs: a configuration is checked, its questions are asked, and what came back survives a kill."""
