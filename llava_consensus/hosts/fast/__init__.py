"""Answering in fixed shapes: after a reduction every prompt of one kind has the same length, so that whole phases of an
answer are captured once and replayed (`attach(model, ..., fast=True)`).

sizes rounds lengths up; capture records a function of fixed buffers (a CUDA graph, on a CPU a tape); cache holds keys
and values in fixed places; decoding is the language model on them; phases are tower and selection; request reads the
arguments of `generate`; checks says who cannot; engine puts them together.
"""
