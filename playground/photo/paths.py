"""Where parts, pictures and training states lie: outside the repository, `PHOTO_WORK` moves it."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PHOTO = ROOT / "playground" / "photo"
CHECKPOINT = ROOT / "checkpoints" / "llava-photo"
WORK = Path(os.environ.get("PHOTO_WORK", Path.home() / ".cache" / "llava-photo"))
