"""Tries a host on the model it has loaded: whether what methods are handed, and what the model answers with a method
attached, is what the model itself computes. `probe(host, method)` takes a minute on real weights.
"""
