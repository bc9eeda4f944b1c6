"""Where things lie, from the repository root."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MINI = ROOT / "playground" / "mini"
CHECKPOINT = ROOT / "checkpoints" / "llava-mini"
WORK = Path(os.environ.get("MINI_WORK", CHECKPOINT / ".work"))  # pools and resumable states, git-ignored
