"""What `mkdocs` calls while it builds the site: pages that are made, pages from outside docs/, and their links.

`mkdocs.yml` names this file. Nothing is written into docs/: the pages exist only while the site is built.
"""

import logging
import os
import re
import subprocess
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files
from pages import GENERATED, notebook

ROOT = Path(__file__).parents[2]
OUTSIDE = {  # pages of the site that are files elsewhere in the repository
    "index.md": "README.md",
    "changelog.md": "CHANGELOG.md",
    "model-card.md": "checkpoints/llava-mini/README.md",
    "model-cards-variants.md": "checkpoints/README.md",
    "model-card-photo.md": "checkpoints/llava-photo/README.md",
}
NOTEBOOK = "docs/notebook.ipynb"
BADGES = re.compile(r"^\[!\[.*\]\(\.\./\.\./.*\n", re.MULTILINE)  # of the repository's page at GitHub
LINK = re.compile(r"(!?\[[^\]]*\]\()([^)#\s]+)((?:#[^)]*)?\))")
ROOTED = re.compile(r'\b(href|src)="/(?=[^/])')
log = logging.getLogger("mkdocs.hooks.site")


def on_config(config: Any) -> Any:
    """Sets the repository's address, where the clone or GITHUB_REPOSITORY knows it."""
    name = os.environ.get("GITHUB_REPOSITORY")
    if name:
        config.repo_url = f"https://github.com/{name}"
    else:
        asked = subprocess.run(["git", "-C", str(ROOT), "remote", "get-url", "origin"], capture_output=True, text=True)
        if asked.stdout.startswith("https://"):
            config.repo_url = asked.stdout.strip().removesuffix(".git")
    return config


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages that are no files of docs/."""
    for name, path in OUTSIDE.items():
        files.append(File.generated(config, name, content=(ROOT / path).read_text("utf-8")))
    for name, make in GENERATED.items():
        files.append(File.generated(config, name, content=make()))
    body, images = notebook(ROOT / NOTEBOOK)
    files.append(File.generated(config, "notebook.md", content=body))
    for name, content in images.items():
        files.append(File.generated(config, name, content=content))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Links of a page that comes from, or leads, outside docs/, as links of the site."""
    source = OUTSIDE.get(page.file.src_uri, f"docs/{page.file.src_uri}")
    markdown = BADGES.sub("", markdown)
    return LINK.sub(lambda link: link[1] + _on_site(link[2], source, page.file.src_uri, files) + link[3], markdown)


def on_post_template(output_content: str, template_name: str, config: Any) -> str:
    """The page for what is not found lies beside all others: its links lead there, wherever the site is, and not to
    the root of its server.
    """
    if template_name != "404.html":
        return output_content
    return ROOTED.sub(r'\1="', output_content).replace('"base": "/"', '"base": "."')


def _on_site(target: str, source: str, here: str, files: Files) -> str:
    """Where a link of the file `source` leads on the site, seen from the page `here`."""
    if "://" in target or target.startswith("mailto:"):
        return target
    path = os.path.normpath(os.path.join(os.path.dirname(source), target))
    known = {outside: name for name, outside in OUTSIDE.items()} | {NOTEBOOK: "notebook.md"}
    name = known.get(path, path.removeprefix("docs/"))
    if files.get_file_from_path(name) is None:
        log.warning(f"{source}: {target} leads to {path}, which is no page of the site: name it in OUTSIDE")
    return os.path.relpath(name, os.path.dirname(here) or ".")
