"""What a tag releases: `python eval_scripts/release.py v0.3.0` prints the notes of that version, its section of
CHANGELOG.md, and refuses a tag that is not this version or has no section. The workflow `release.yml` runs it first.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def notes(tag: str, root: Path = ROOT) -> str:
    """The section of a tag's version in the changelog.

    Raises:
        SystemExit: the tag is not the version of the package, or the changelog has no section of it.
    """
    found = re.search(r'^__version__ = "(.+)"$', (root / "llava_consensus" / "__init__.py").read_text(), re.MULTILINE)
    version = found[1] if found else ""
    if tag != f"v{version}":
        raise SystemExit(f"tag {tag}: llava_consensus/__init__.py says {version}, so that the tag must be v{version}")
    section = re.search(
        rf"^## {re.escape(version)}\b.*\n+((?:(?!## ).*\n)+)", (root / "CHANGELOG.md").read_text(), re.MULTILINE
    )
    if section is None:
        raise SystemExit(f"tag {tag}: CHANGELOG.md has no section {version}. Rename Unreleased, and begin a new one")
    return section[1].strip()


if __name__ == "__main__":
    print(notes(sys.argv[1]))
