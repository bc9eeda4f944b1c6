"""Shim for `pip install -e .` with old tools, and what the metadata in pyproject.toml cannot say: a wheel carries the
embedded model and the generator of its benchmarks, which `llava-consensus data mini` copies to where one works.
"""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

EMBEDDED = ("checkpoints/llava-mini", "playground/mini")
LEFT_OUT = shutil.ignore_patterns("__pycache__", "eval", ".eval-*", ".work")


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


setup(cmdclass={"build_py": WithMini})
