"""Flag private phrases in lines that were added: `python -m tools.plain [BASE]`, part of `make style`.

BASE is a commit, by default the last one on main before yours, or the one before HEAD.
"""

import re
import subprocess
import sys

PHRASES = {  # what to look for, and what to write
    r"(?<![\"'-])\bpictures?\b(?![\"'\w=(\]):]| is)": "image",  # but for keys of files, and the old names
    r"\bwhat (became|becomes) of\b": "the result of",
    r"\bstands? (in|on|at|for)\b": "is in, means",
    r"\b(hand|hands|handed) on\b": "pass, return",
    r", shown\b(?=[.,;:)]|$)": "significant",
    r"\balone\b(?=[.,;:)]|$)": "only",
    r"\bwhere (there|it|that|one) (is|are) (no|none|any)\b": "if",
    r"\bsettles?\b": "decide, set",
    r"\btwins?\b": "copy, counterpart",
}
SKIPPED = ("tools/plain.py", "tests/", "docs/results", "docs/notebook", "CHANGELOG.md", "playground/")


def git(*words: str) -> str:
    """Output of git; empty if it fails."""
    return subprocess.run(["git", *words], capture_output=True, text=True).stdout.strip()


def added(base: str) -> list[tuple[str, int, str]]:
    """File, number and text of the lines of prose files that were added since a commit."""
    found, path, number = [], "", 0
    for text in git("diff", "-U0", "--no-color", base, "--", "*.md", "*.py").splitlines():
        if text.startswith("+++ "):
            path = text[6:]
        elif text.startswith("@@"):
            number = int(text.split("+")[1].split(",")[0].split(" ")[0])
        elif text.startswith("+") and not path.startswith(SKIPPED):
            found.append((path, number, text[1:]))
            number += 1
    return found


def main() -> int:
    """1 if a phrase was added, else 0."""
    base = sys.argv[1] if len(sys.argv) > 1 else git("merge-base", "HEAD", "main") or git("rev-parse", "HEAD~1")
    if base and base == git("rev-parse", "HEAD"):
        base = git("rev-parse", "HEAD~1")
    lines = added(base) if base else []
    hits = []
    for path, number, text in lines:
        for phrase, better in PHRASES.items():
            if (match := re.search(phrase, text)) and not re.match(r"\s*(def|class|from|import)\b", text):
                hits.append((path, number, match[0], better))
    for path, number, word, better in hits:
        print(f"{path}:{number}: {word!r}: write {better!r}")
    return int(bool(hits))


if __name__ == "__main__":
    sys.exit(main())
