"""Shim for `pip install -e .` with old tools; the metadata lives in pyproject.toml."""

from setuptools import setup

setup()
