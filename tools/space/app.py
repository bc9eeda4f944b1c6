"""The page as a Space of Hugging Face: the embedded model in the layout of transformers, and pictures to try."""

import threading
from pathlib import Path

from llava_consensus.demo import app
from llava_consensus.evaluation import models

MODEL = "checkpoints/llava-mini-hf"

blocks = app.build(models.load(MODEL), MODEL, Path("playground/mini"))
app.launch(blocks, "0.0.0.0", 7860)
threading.Event().wait()
