"""What a tag releases: `python tools/release.py v0.3.0` names what CHANGELOG.md calls Unreleased by it,
and prints the notes, which are that section; CITATION.cff gets version and date. Where GITHUB_REPOSITORY names the
repository, README.md gets the link that opens the notebook in Colab, and the notebook the address. The workflow
`release.yml` runs it before it builds, and commits what it wrote afterwards.
"""

import os
import re
import sys
from datetime import date
from pathlib import Path

ROOT = Path(__file__).parents[1]
NOTEBOOK = "[notebook](docs/notebook.ipynb)"


def released(log: str, tag: str, day: date) -> tuple[str, str]:
    """The changelog with a section of the tag's version, and the notes.

    Raises:
        SystemExit: the tag is no version, or nothing is written about it.
    """
    version = re.fullmatch(r"v(\d+\.\d+\.\d+\S*)", tag)
    if version is None:
        raise SystemExit(f"tag {tag}: must be a version, such as v0.3.0")
    if not re.search(rf"^## {re.escape(version[1])}(?!\S)", log, re.MULTILINE):
        log = log.replace("## Unreleased\n", f"## Unreleased\n\n## {version[1]} ({day})\n", 1)
    section = re.search(rf"^## {re.escape(version[1])}(?!\S).*\n((?:(?!## ).*\n)*)", log, re.MULTILINE)
    if section is None or not section[1].strip():
        raise SystemExit(f"tag {tag}: CHANGELOG.md says nothing about it. Write what is new under Unreleased")
    return log, section[1].strip()


def cited(citation: str, tag: str, day: date) -> str:
    """CITATION.cff with the version of the tag; the date stays where that version has one."""
    if f"\nversion: {tag[1:]}\n" in citation:
        return citation
    citation = re.sub(r"^version: .*$", f"version: {tag[1:]}", citation, flags=re.MULTILINE)
    return re.sub(r"^date-released: .*$", f"date-released: {day}", citation, flags=re.MULTILINE)


def with_colab(readme: str, repository: str) -> str:
    """The front page, whose first word of the notebook has a link beside it that opens it in Colab."""
    link = f" ([in Colab](https://colab.research.google.com/github/{repository}/blob/main/docs/notebook.ipynb))"
    return readme if "colab.research" in readme else readme.replace(NOTEBOOK, NOTEBOOK + link, 1)


def main(tag: str, root: Path = ROOT) -> None:
    """Write the files, and print the notes."""
    changelog, readme, citation = root / "CHANGELOG.md", root / "README.md", root / "CITATION.cff"
    log, notes = released(changelog.read_text("utf-8"), tag, date.today())
    changelog.write_text(log, "utf-8")
    citation.write_text(cited(citation.read_text("utf-8"), tag, date.today()), "utf-8")
    if repository := os.environ.get("GITHUB_REPOSITORY"):
        readme.write_text(with_colab(readme.read_text("utf-8"), repository), "utf-8")
        notebook = root / "docs" / "notebook.ipynb"
        address = f'ADDRESS = \\"https://github.com/{repository}\\"'
        notebook.write_text(notebook.read_text("utf-8").replace('ADDRESS = \\"\\"', address), "utf-8")
    print(notes)


if __name__ == "__main__":
    main(sys.argv[1])
