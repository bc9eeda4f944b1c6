"""Runs: a configuration is checked, its questions are asked, and the answers survive a kill.

The constants are the defaults of model, data and results, relative to the working directory.
"""

from pathlib import Path

MODEL, DATA, OUT = "checkpoints/llava-mini", "playground/mini", "results"
EMBEDDED = "llava-mini"  # the embedded model's folder, wherever `data mini` has put it
DRAWINGS = (
    "the embedded llava-mini knows drawn scenes of emoji and signs alone: what it says of a photograph means nothing. "
    "Another model is given with --model"
)


def knows_drawings_alone(model: str) -> bool:
    return Path(model).is_dir() and Path(model).resolve().name in (EMBEDDED, f"{EMBEDDED}-hf")
