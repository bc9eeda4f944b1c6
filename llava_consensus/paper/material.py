"""Data of the figures: runs, measurements of time and memory, the controlled study. Pure reading of files.

A folder of results holds runs (a folder each), files of `llava-consensus bench` (`bench*.json`), and the study's files.
A figure asks for what it shows; where that is not there it raises `NotMeasured`, and the figure is listed, not drawn.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llava_consensus.evaluation.files import read_json
from llava_consensus.evaluation.report.results import in_sections
from llava_consensus.evaluation.report.rows import Catalogue, read_rows
from llava_consensus.evaluation.report.section import Section

STUDY, SCAP = "study.json", "scap.json"
STUDY_AGAIN = "Remove it; llava-consensus paper study makes it again"
AGAIN = "Measure again with llava-consensus bench, or move it away"


class NotMeasured(Exception):
    """Results of a figure are missing; the message names them."""


@dataclass(frozen=True)
class Material:
    """The content of a folder of results."""

    sections: Sequence[Section] = ()
    benches: Sequence[dict[str, Any]] = field(default_factory=list)  # contents of bench files, by name of the file

    study: dict[str, Any] | None = None  # content of study.json
    scap: dict[str, Any] | None = None  # content of scap.json
    other_scaps: Sequence[dict[str, Any]] = ()  # of further models, FOLDER/MODEL.scap.json

    @property
    def measured(self) -> list[dict[str, Any]]:
        """One bench file for each model, the one with most rows."""
        if not self.benches:
            raise NotMeasured("no bench*.json")
        largest: dict[str, dict[str, Any]] = {}
        for content in sorted(self.benches, key=lambda content: len(content["rows"])):
            largest[content["model"]] = content
        return [largest[model] for model in dict.fromkeys(content["model"] for content in self.benches)]

    def bench_of(self, budgets: Iterable[float]) -> list[dict[str, Any]]:
        """The rows of the bench file that has most of these budgets."""
        if not self.benches:
            raise NotMeasured("no bench*.json")
        wanted = set(budgets)
        found = [content["rows"] for content in self.benches]
        return max(found, key=lambda rows: len(wanted & {row["tokens"] for row in rows}))


def read(out: Path, known: Catalogue | None = None) -> Material:
    """Reads a folder of results.

    Args:
        out: the folder.
        known: what methods and benchmarks are called that no finished run there says itself.
    Raises:
        DataError: a file is not what its command writes.
    """
    others = [read_json(path, STUDY_AGAIN, dict) for path in sorted(out.glob(f"*/*.{SCAP}"))]
    return Material(
        in_sections(read_rows(out, known)), benches(out), _of_study(out, STUDY), _of_study(out, SCAP), others
    )


def benches(out: Path) -> list[dict[str, Any]]:
    """Contents of the bench files of a folder, by name of the file."""
    found = [read_json(path, AGAIN) for path in sorted(out.glob("bench*.json"))]
    return [content for content in found if isinstance(content, dict) and content.get("rows")]


def _of_study(out: Path, name: str) -> dict[str, Any] | None:
    """A file of the study, in the folder of results or in one of its own there; the first by name."""
    found = sorted([*out.glob(name), *out.glob(f"*/{name}")])
    return read_json(found[0], STUDY_AGAIN, dict) if found else None
