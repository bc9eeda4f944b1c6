"""The site builds without a warning and without asking anybody, every link of it leads somewhere, and the
notebook still says what it says there.
"""

import os
import re
import runpy
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

ROOT = Path(__file__).parents[2]
ALONE = """
import socket
def refused(*_):
    raise OSError("the site asked somebody")
socket.socket.connect = socket.create_connection = socket.getaddrinfo = refused
from mkdocs.__main__ import cli
cli()
"""
FETCHED = {"script": "src", "img": "src", "link": "href", "iframe": "src", "source": "src"}


class Page(HTMLParser):
    """What a page links to, what it fetches, and its anchors."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.fetched: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.anchors.add(found.get("id") or "")
        if tag == "a":
            self.links.append(found.get("href") or "")
        elif tag in FETCHED and found.get("rel") not in ("prev", "next", "canonical"):
            self.fetched.append(found.get(FETCHED[tag]) or "")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> dict[Path, Page]:
    """Every page of the site, built as `make site` does."""
    pytest.importorskip("material", reason="needs the extra docs")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-c", ALONE, "build", "--strict", "-f", str(ROOT / "mkdocs.yml"), "-d", str(folder)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT, timeout=300)
    assert done.returncode == 0 and "WARNING" not in done.stderr, done.stderr[-4000:]
    return {path: Page(path.read_text("utf-8")) for path in sorted(folder.rglob("*.html"))}


def test_every_link_of_the_site_leads_somewhere_and_nothing_is_fetched_from_elsewhere(site: dict[Path, Page]) -> None:
    lost = []
    for path, page in site.items():
        assert [link for link in page.fetched if urlsplit(link).netloc] == []
        for parts in map(urlsplit, [*page.links, *page.fetched]):
            if parts.scheme:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            known = not parts.fragment or target not in site or unquote(parts.fragment) in site[target].anchors
            if not target.exists() or not known:
                lost.append((path.name, parts.geturl()))
    assert lost == []


def test_the_notebook_says_what_it_said() -> None:
    """Executed again; figures of time and names of temporary folders aside."""
    pytest.importorskip("nbclient", reason="needs the extra docs")
    pytest.importorskip("ipykernel", reason="needs the extra docs")
    import nbformat

    module = runpy.run_path(str(ROOT / "docs" / "site" / "notebook.py"))
    now, then = module["executed"](), nbformat.read(module["NOTEBOOK"], 4)
    said = _said(now)
    assert said == _said(then), "python docs/site/notebook.py executes it anew"
    assert sum("image/png" in one.get("data", {}) for cell in now.cells for one in cell.get("outputs", [])) == 2
    assert "64 of 576" in said


def _said(notebook: Any) -> str:
    """What is printed, without what differs each time. Answers of random tokens are near ties, which differ by CPU."""
    outputs = [one for cell in notebook.cells for one in cell.get("outputs", [])]
    texts = [one.get("text") or one.get("data", {}).get("text/plain", "") for one in outputs]
    differing = re.compile("/tmp|<PIL|random |time to")
    return "\n".join(line.rstrip() for line in "".join(texts).splitlines() if not differing.search(line))
