"""Write the mini benchmarks in the official file formats and folder layout, from test scenes only.

    python -m playground.mini.build [--out playground/mini]

Makes `<out>/eval/<folder>` for every builder in `benchmarks/`, with the names that LLaVA's and Video-LLaVA's scripts
expect. The same files come out every time; when they are complete the command does nothing.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
from pathlib import Path

from playground.mini.benchmarks import BUILDERS
from playground.mini.paths import MINI

SOURCES = ("catalogue.py", "glyphs.py", "glyphs.png", "scenes.py", "clips.py", "questions.py", "styles.py", "build.py")


def fingerprint() -> str:
    """A hash of everything the files depend on."""
    digest = hashlib.sha256()
    for path in (*(MINI / name for name in SOURCES), *sorted((MINI / "benchmarks").glob("*.py"))):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def build(out: Path = MINI) -> bool:
    """Write `<out>/eval` unless it is complete; True when something was written. A kill leaves no half."""
    target = out / "eval"
    stamp = target / ".complete"
    if stamp.exists() and stamp.read_text() == fingerprint():
        return False
    part = out / f".eval-{os.getpid()}"
    shutil.rmtree(part, ignore_errors=True)
    for name, builder in BUILDERS.items():
        builder(part / name)
    (part / ".complete").write_text(fingerprint())
    if target.exists():
        shutil.rmtree(target)
    os.replace(part, target)
    return True


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=MINI, help="folder that gets eval/ (default: playground/mini)")
    out = parser.parse_args().out
    written = build(out)
    print(f"{out / 'eval'}: {'written' if written else 'complete, nothing to do'}")


if __name__ == "__main__":
    main()
