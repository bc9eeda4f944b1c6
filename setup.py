"""Shim for `pip install -e .` with old tools, and what pyproject.toml cannot say. The version is that of the last tag,
and the package index gets README.md with links that lead there too. A wheel carries the embedded model and the
generator of its benchmarks, which `llava-consensus data mini` copies to where one works.
"""

import os
import re
import shutil
import subprocess
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
EMBEDDED = ("checkpoints/llava-mini", "playground/mini")
LEFT_OUT = shutil.ignore_patterns("__pycache__", "eval", ".eval-*", ".work")


def version() -> str:
    """An sdist knows its own; in a clone, the last tag, `.postN` if N commits ago; else the last of CHANGELOG.md."""
    told = ROOT / "PKG-INFO"
    if told.exists():
        return re.findall(r"^Version: (.+)$", told.read_text("utf-8"), re.MULTILINE)[0]
    last = re.findall(r"^## (\d\S*)", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.MULTILINE)[0]
    if not (ROOT / ".git").exists():
        return last
    describe = ["git", "-C", str(ROOT), "describe", "--tags", "--long", "--match", "v[0-9]*"]
    try:
        said = subprocess.run(describe, check=True, capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):  # no git, or no tag
        return last
    tag, commits, _ = said.removeprefix("v").rsplit("-", 2)
    return tag if commits == "0" else f"{tag}.post{commits}"


def front_page(version: str) -> str:
    """README.md; where GITHUB_REPOSITORY names the repository, with whole addresses in place of paths."""
    text, name = (ROOT / "README.md").read_text("utf-8"), os.environ.get("GITHUB_REPOSITORY")
    if not name:
        return text
    address = f"https://github.com/{name}"
    text = text.replace("](../../", f"]({address}/")
    text = re.sub(r"(!\[[^\]]*\]\()(?!https?:|#)", rf"\1{address}/raw/v{version}/", text)
    return re.sub(r"(\[[^\]]*\]\()(?!https?:|#)", rf"\1{address}/blob/v{version}/", text)


class WithMini(build_py):
    """Builds the package, and puts both folders into it; an editable install finds them in the checkout."""

    def run(self) -> None:
        """Copies after the package is there."""
        super().run()
        if getattr(self, "editable_mode", False):
            return
        for part in EMBEDDED:
            target = Path(self.build_lib) / "llava_consensus" / "evaluation" / "data" / "embedded" / part
            shutil.copytree(part, target, ignore=LEFT_OUT, dirs_exist_ok=True)


def urls() -> dict[str, str]:
    """Addresses of the project, those of the repository where GITHUB_REPOSITORY names it."""
    found, name = {"Paper": "https://arxiv.org/abs/2602.00946"}, os.environ.get("GITHUB_REPOSITORY")
    if name:
        address = f"https://github.com/{name}"
        found |= {
            "Repository": address,
            "Issues": f"{address}/issues",
            "Changelog": f"{address}/blob/main/CHANGELOG.md",
        }
    return found


VERSION = version()
setup(
    version=VERSION,
    project_urls=urls(),
    long_description=front_page(VERSION),
    long_description_content_type="text/markdown",
    cmdclass={"build_py": WithMini},
)
