"""Write the mini benchmarks in the official file formats and folder layout, from test scenes.

    python -m playground.mini.build [--out playground/mini]
    python -m playground.mini.build --split val --out playground/mini-val   # gqa, pope, textvqa, to choose options on
    python -m playground.mini.build --split large --out playground/mini-large   # 250 pictures; TextVQA with OCR words
    python -m playground.mini.build --split brief --out playground/mini-brief   # clips, most things seen in one frame

Makes `<out>/eval/<folder>` for every builder in `benchmarks/`, with the names that LLaVA's and Video-LLaVA's scripts
expect. The same files come out every time; when they are complete the command does nothing. Without PyAV, which writes
videos, the benchmarks of videos are left out, and made when it is there.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import signal
import sys
from importlib.util import find_spec
from pathlib import Path

from llava_consensus.evaluation.data.mini import remove_leftovers
from playground.mini.benchmarks import BUILDERS, WITH_SPLIT
from playground.mini.paths import MINI

VIDEOS = "GPT_Zero_Shot_QA"  # the folder of BUILDERS that holds videos
SOURCES = ("catalogue.py", "glyphs.py", "glyphs.webp", "scenes.py", "clips.py", "questions.py", "styles.py", "build.py")


def fingerprint() -> str:
    """A hash of everything the files depend on."""
    digest = hashlib.sha256()
    for path in (*(MINI / name for name in SOURCES), *sorted((MINI / "benchmarks").glob("*.py"))):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def left_out(split: str) -> list[str]:
    """The folders that cannot be made here: those of videos, where PyAV is not installed."""
    return (
        [VIDEOS] if VIDEOS in (BUILDERS if split == "test" else WITH_SPLIT[split]) and find_spec("av") is None else []
    )


def build(out: Path = MINI, split: str = "test") -> bool:
    """Write `<out>/eval` unless it is complete; True when something was written. A kill leaves no half.

    Args:
        split: `test`, all benchmarks | `val`, some from scenes that are neither trained nor tested on | `large`, GQA,
            POPE and VQAv2 about 250 other test scenes each, with 3 to 5 questions, and TextVQA's with the words beside
            | `brief`, MSVD's files about clips of which most things are seen in one frame.
    """
    target = out / "eval"
    stamp = target / ".complete"
    without = left_out(split)
    state = " ".join([split, fingerprint(), *(f"without {name}" for name in without)])
    if stamp.exists() and stamp.read_text() == state:
        return False
    remove_leftovers(out / ".eval-")
    part = out / f".eval-{os.getpid()}"
    try:
        if split == "test":
            for name, builder in BUILDERS.items():
                if name not in without:
                    builder(part / name)
        else:
            for name, with_split in WITH_SPLIT[split].items():
                if name not in without:
                    with_split(part / name, split)
        (part / ".complete").write_text(state)
        shutil.rmtree(target, ignore_errors=True)
        os.replace(part, target)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=MINI, help="folder that gets eval/ (default: playground/mini)")
    parser.add_argument("--split", choices=("test", *WITH_SPLIT), default="test", help="which scenes (default: test)")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that `finally` removes what was begun
    written = build(given.out, given.split)
    print(f"{given.out / 'eval'}: {'written' if written else 'complete, nothing to do'}")
    if left_out(given.split):
        print("videos are left out: pip install av (or llava-consensus[video]), then the same command again")


if __name__ == "__main__":
    main()
