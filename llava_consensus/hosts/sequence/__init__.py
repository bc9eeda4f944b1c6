"""Assembled sequences: where the visual tokens stand, and how reduced ones take their place."""
