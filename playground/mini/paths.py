"""Where things lie, from the repository root."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MINI = ROOT / "playground" / "mini"
CHECKPOINT = ROOT / "checkpoints" / "llava-mini"
