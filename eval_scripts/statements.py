"""Every statement of README.md and docs/*.md that names a measured number, with where it comes from.

    python -m eval_scripts.statements    # `make statements`: the list, as a table; ends with 1 if one has no source

A statement is a sentence or a table with a number and a unit (percent, points, times, seconds, bytes, FLOPs) or an
interval. Its source is named by itself, in its paragraph, or by the line `Source: ...` that ends the passage it
stands in: what lies between two headings, or between such a line and the next. What is a source: the kept results, a
file of results, the paper or another publication, a test, code or a command that counts or computes, a date with a
machine, and where none of these is named another page, which is checked itself. What lies between a page's markers is
made by `make pages`. A decimal number of prose whose source is the kept results, or docs/results.md, must stand in one
of those tables. `tests/project/test_statements.py` holds it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
KEPT, PAGE = "measured.tar.xz", "page"
UNIT = (
    r"%|percent|points?|times|fold|[KMGT]i?B|bytes|ms|s|seconds?|minutes?|hours?|days?|[MGT]?FLOPs?|questions a second"
)
NUMBER = re.compile(rf"(?<![\w.=`-])[+-]?\d[\d,]*(?:\.\d+)?\s?(?:{UNIT})(?![\w-])|\d ?±|\d(?:\.\d+)? → \d|\(sd \d")
IN_TABLE = re.compile(rf"{NUMBER.pattern}|\d\.\d")
NO_NUMBER = re.compile(
    r"\b95 %|`[^`]*`|\]\([^)]*\)|https?://\S+|(?:LLaVA|NeXT|Qwen|SparseVLM|vicuna|torch|transformers|vLLM)[ -]?v?[\d.]+"
    r"(?: and [\d.]+)?"
)
DECIMAL = re.compile(r"(?<![\d.,])\d+\.\d(?![\d.])")
SOURCES = {  # what a source is, by the words that name it; the first that fits is the kind
    "kept results": re.compile(re.escape(KEPT)),
    "file": re.compile(r"[\w/.-]+\.json\b"),
    "published": re.compile(r"arXiv|the paper('s|s)? (own|print|table|\d)|papers? prints?|as printed|paper\.json"),
    "test": re.compile(r"tests/[\w/]+\.py"),
    "command": re.compile(r"`(?:llava-consensus|make|\.venv/bin/\S+|python -m) [^`]+`"),
    "dated": re.compile(r"20\d\d-\d\d-\d\d.*(?:core|machine|processor|EPYC|CPU)", re.DOTALL),
    "code": re.compile(r"llava_consensus/[\w/]+\.py|[Tt]he arithmetic is|by formula"),
    PAGE: re.compile(r"\((?:docs/|\.\./)?[\w/-]+\.md(?:#[\w-]+)?\)"),
}
LINK = re.compile(r"\]\(([^)#:]+)(?:#[^)]*)?\)|((?:tests|llava_consensus)/[\w/]+\.py)")
MADE = "numbers|results|videos|composition|beds|ablations|budgets"  # markers of what `make pages` writes
BEGIN, END = (re.compile(rf"<!-- (?:{MADE}):{edge} -->") for edge in ("begin", "end"))


class Statement(NamedTuple):
    """What is said, where, and by which kind of source; an empty kind is none."""

    page: str
    line: int
    text: str
    kind: str
    source: str
    wrong: str = ""  # what is the matter with the source


class Block(NamedTuple):
    """A paragraph, a point of a list or a table; or what `make pages` wrote, which is `made`."""

    line: int
    text: str
    made: bool = False

    @property
    def table(self) -> bool:
        """Whether it is one."""
        return self.text.startswith("|")


def blocks(text: str) -> Iterator[Block]:
    """The blocks of a page in order, headings among them, without code."""
    lines: list[str] = []
    start, made, code = 0, False, False

    for number, line in enumerate([*text.splitlines(), ""], start=1):
        fence, edge = line.startswith("```"), bool(BEGIN.match(line) or END.match(line))
        ends = fence or edge or not line.strip() or bool(re.match(r"#|- |\d+\. |\|", line))
        if lines and ends and not (line.startswith("|") and lines[-1].startswith("|")):
            yield Block(start, "\n".join(lines), made)
            lines = []
        code ^= fence
        made = bool(BEGIN.match(line)) or (made and not END.match(line))
        if not (fence or edge or code or line.startswith("    ") or not line.strip()):
            start = start if lines else number
            lines.append(line)


def sentences(block: Block) -> list[str]:
    """Those of a block that name a number; a table is one."""
    plain = NO_NUMBER.sub("", block.text)
    if block.table:
        return [block.text.split("\n")[0]] if IN_TABLE.search(plain) else []
    found = re.split(r"(?<=[.:;])\s+(?=[A-Z*`\[(])", block.text.replace("\n", " "))
    return [one for one in found if NUMBER.search(NO_NUMBER.sub("", one))]


def kind_of(text: str) -> str:
    """The kind of source that a text names; empty where it names none."""
    return next((kind for kind, words in SOURCES.items() if words.search(text)), "")


def statements(page: Path, known: set[str], root: Path = ROOT) -> Iterator[Statement]:
    """The statements of one page.

    Args:
        page: its file.
        known: decimal numbers of the tables that `make pages` writes.
    """
    passage: list[Block] = []
    for block in [*blocks(page.read_text(encoding="utf-8")), Block(0, "# end")]:
        ends = block.text.startswith(("#", "Source:"))
        if not ends:
            passage.append(block)
            continue
        named = block.text.removeprefix("Source:").strip() if block.text.startswith("Source:") else ""
        for one in passage:
            for sentence in sentences(one):
                said = [f"[{KEPT}]"] if one.made else [sentence, one.text, named]
                firm = [text for text in said if kind_of(text) not in ("", PAGE)]
                source = next(iter(firm or filter(kind_of, said)), "")
                kind = kind_of(source)
                wrong = "" if one.made else absent(sentence, source, kind, page, known, root)
                yield Statement(str(page.relative_to(root)), one.line, sentence, kind, source, wrong)
        passage = []


def absent(sentence: str, source: str, kind: str, page: Path, known: set[str], root: Path) -> str:
    """What keeps a source from being one: a file that is not there, a number that no table has."""
    for link, test in LINK.findall(source):
        path = root / test if test else page.parent / link
        if not path.exists():
            return f"{link or test} is not there"
    if kind == "kept results" or (kind == PAGE and "results.md" in source):
        missing = [number for number in DECIMAL.findall(NO_NUMBER.sub("", sentence)) if number not in known]
        return f"no table has {', '.join(missing)}" if missing else ""
    return "" if kind else "no source"


def pages(root: Path = ROOT) -> list[Path]:
    """README.md and docs/*.md."""
    return [root / "README.md", *sorted((root / "docs").glob("*.md"))]


def every(root: Path = ROOT) -> list[Statement]:
    """The statements of all pages."""
    made = [block.text for page in pages(root) for block in blocks(page.read_text(encoding="utf-8")) if block.made]
    known = {number for text in made for number in DECIMAL.findall(text)}
    return [one for page in pages(root) for one in statements(page, known, root)]


def main() -> None:
    """Prints the list; the exit code tells whether every statement has a source."""
    found = every()
    print("| where | statement | source | as named |\n|---|---|---|---|")
    for one in found:
        text, source = (re.sub(r"\s+", " ", cell).replace("|", "/") for cell in (one.text, one.source))
        print(f"| {one.page}:{one.line} | {text} | {one.kind or '**none**'} | {source[:160]} |")
    wrong = [one for one in found if one.wrong]
    for one in wrong:
        print(f"{one.page}:{one.line}: {one.wrong}: {one.text[:120]}", file=sys.stderr)
    print(f"{len(found)} statements, {len(wrong)} without a source that holds", file=sys.stderr)
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
