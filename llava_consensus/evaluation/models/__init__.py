"""Models as the evaluation asks them: found and loaded (`loading.py`), asked (`base.py` and a file for each kind of
model), compared with the unpatched model (`check_host.py`), and written in another layout (`convert.py`).
"""

from llava_consensus.evaluation.media import Clip
from llava_consensus.evaluation.models.base import Answer, Encoding, Prompt, Runner
from llava_consensus.evaluation.models.loading import CLIPS, Checkpoint, Loading, check, find, load, name_of, pinned

__all__ = [
    "CLIPS",
    "Answer",
    "Checkpoint",
    "Clip",
    "Encoding",
    "Loading",
    "Prompt",
    "Runner",
    "check",
    "find",
    "load",
    "name_of",
    "pinned",
]
