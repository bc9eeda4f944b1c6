"""Which settings do published results and our own kept results support for a model, a task and a budget?

Scores of different tables are averages over different benchmarks, so methods are ranked within a table only. The data
are `evidence.csv`, which `make pages` writes from `paper/ledger.json` (published results and their sources),
`evaluation/report/paper.json` (the tables of the ConsensusDrop paper) and our runs. Nothing here is estimated.
"""

import csv
import json
import re
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import NamedTuple

from llava_consensus.errors import OptionError, unknown_name
from llava_consensus.methods import METHODS, about, make

RELATIVE = ("relative", "relative_video")  # percent of the full model's score, averaged over the benchmarks of a table
AVERAGES = (*RELATIVE, "average")
OWN, OURS = "scenes", "consensusdrop"


class Family(NamedTuple):
    """Models that share a language model and a number of visual tokens."""

    title: str
    hub: str  # name of a checkpoint
    pattern: str  # of model names
    types: tuple[str, ...]  # `model_type` of configurations
    published: str  # name in the ledger
    tokens: int  # visual tokens of an image; 100 if budgets are percentages
    layers: int
    keeps: bool = False  # positions have several axes, so that every method keeps them


_FILES = resources.files("llava_consensus")
_LEDGER = json.loads(_FILES.joinpath("paper/ledger.json").read_text("utf-8"))
TASKS = _LEDGER["tasks"]  # by task, the columns of published tables and of our runs that speak about it
FAMILIES = {name: Family(**family) for name, family in _LEDGER["families"].items()}


@dataclass(frozen=True)
class Evidence:
    family: str  # as in the ledger
    method: str  # name in `METHODS`, or the title of a method this package does not have
    tokens: int
    benchmark: str
    score: float
    source: str
    positions: str = ""  # "" if the table does not say
    questions: int | None = None  # of our runs
    bounds: tuple[float, float] | None = None  # 95 % interval of our runs


@dataclass(frozen=True, kw_only=True)
class Choice(Evidence):
    entering: int  # visual tokens entering the first layer
    mean: float  # and on average over layers
    place: str  # determines the cost of the vision tower
    by_authors: bool  # whether the table is by the authors of the method
    full: float | None  # score of the same table with all tokens; None if it does not say


@cache
def scores() -> tuple[Evidence, ...]:
    """Every result: published, the ConsensusDrop paper's, ours."""
    found = []
    for row in csv.DictReader(_FILES.joinpath("evidence.csv").read_text("utf-8").splitlines()):
        kind = row["family"], row["method"], int(row["tokens"]), row["benchmark"], float(row["score"]), row["source"]
        own = (int(row["questions"]), (float(row["low"]), float(row["high"]))) if row["questions"] else ()
        found.append(Evidence(*kind, row["positions"], *own))
    return tuple(found)


def family_of(model: str) -> str | None:
    """The family of a checkpoint folder or a model's name; None if there is no evidence for it."""
    config = Path(model).expanduser() / "config.json"
    if config.is_file() and "llava-photo" not in model:
        kind = json.loads(config.read_text("utf-8")).get("model_type")
        return next((name for name, family in FAMILIES.items() if kind in family.types), None)
    return next((name for name, family in FAMILIES.items() if re.search(family.pattern, model.lower())), None)


def recommend(
    model: str = "llava-1.5", task: str = "general", tokens: int | None = None, share: float | None = None
) -> list[Choice]:
    """Settings that results support, the best of each table first, tables of the nearest budget first.

    Args:
        model: name or checkpoint folder.
        task: one of TASKS.
        tokens: visual tokens of an image; the nearest budget of the tables is taken.
        share: the same as a share of an image's tokens, in (0, 1).
    Returns:
        Nothing if there is no evidence.
    Raises:
        OptionError: for an unknown task, or a budget outside its bound.
    """
    if task not in TASKS:
        raise unknown_name("task", task, list(TASKS))
    if tokens is not None and share is not None:
        raise OptionError(f"tokens={tokens} beside share={share}: give one of them")
    if tokens is not None and tokens < 1:
        raise OptionError(f"tokens={tokens} must be at least 1")
    if share is not None and not 0 < share < 1:
        raise OptionError(f"share={share} must be between 0 and 1")
    family = FAMILIES.get(family_of(model) or "")
    if family is None or not TASKS[task]:
        return []
    wanted = tokens if tokens is not None else round((share or 64 / 576) * family.tokens)
    if family.tokens == 100 and tokens is not None:
        raise OptionError(f"tokens={tokens}: published budgets of {family.title} are shares. Give share=0.1")
    known = [one for one in scores() if one.family == family.published and one.method in METHODS]
    known = [one for one in known if one.benchmark in TASKS[task] and one.tokens < family.tokens]
    if any(one.benchmark in AVERAGES for one in known):  # single benchmarks only if no average was published
        known = [one for one in known if one.benchmark in AVERAGES]
    found = []
    for source, benchmark in dict.fromkeys((one.source, one.benchmark) for one in known):
        table = [one for one in known if (one.source, one.benchmark) == (source, benchmark)]
        nearest = min({one.tokens for one in table}, key=lambda budget: (abs(budget - wanted), budget))
        found.append(sorted((one for one in table if one.tokens == nearest), key=lambda one: -one.score))
    # budgets within a quarter of the wanted one count as equally near, so that 10 % does not lose to 11 %
    found.sort(
        key=lambda rows: (rows[0].source.startswith("our"), 4 * abs(rows[0].tokens - wanted) // wanted, -len(rows))
    )
    full = {(one.source, one.benchmark): one.score for one in scores() if _is_full(one, family)}
    return [_choice(one, family, full.get((one.source, one.benchmark))) for rows in found for one in rows]


def _is_full(score: Evidence, family: Family) -> bool:
    unreduced = score.method == "full" or score.method not in METHODS
    return score.family == family.published and score.tokens == family.tokens and unreduced


def _choice(score: Evidence, family: Family, full: float | None) -> Choice:
    from llava_consensus.reduction.budget import Budget

    entering = make(score.method).entering(Budget(score.tokens), family.tokens, family.layers)
    positions = "keep" if family.keeps else score.positions or make(score.method).positions
    return Choice(
        **{**vars(score), "positions": positions},
        entering=entering[0],
        mean=round(sum(entering) / len(entering), 1),
        place=about(score.method).place,
        by_authors=score.source.lower().startswith(score.method.rstrip("+")),
        full=full,
    )


def warnings(model: str, task: str) -> list[str]:
    """Known failures and effects of positions, each with the numbers of its source."""
    family, found = FAMILIES.get(family_of(model) or ""), list[str]()
    if family is None:
        return found
    own = [one for one in scores() if one.family == family.published]
    full = {one.benchmark: one.score for one in own if _is_full(one, family)}
    unit = " %" if family.tokens == 100 else " tokens"
    rows = [one for one in own if one.benchmark == "textvqa" and one.method in METHODS and one.method != "full"]
    tokens = 64 if family.tokens != 100 else min((one.tokens for one in rows), default=0)
    small = {(one.method, one.source): one.score for one in rows if one.tokens == tokens}
    if task in ("ocr", "general") and "textvqa" in full and small:
        found.append(
            f"small print: TextVQA is {min(small.values()):g} to {max(small.values()):g} with {tokens}{unit}, "
            f"{full['textvqa']:g} with all ({len(small)} published rows)"
        )
    policies = {
        policy: {one.benchmark: one for one in own if one.positions == policy and one.method in (OURS, name)}
        for policy, name in (("renumber", "positions renumbered"), ("keep", "positions kept"))
    }
    both = policies["renumber"].keys() & policies["keep"].keys()
    for benchmark in sorted(both & {*TASKS[task], "textocr_hard"} or both)[:1]:
        renumber, keep = policies["renumber"][benchmark], policies["keep"][benchmark]
        found.append(
            f"positions: {benchmark} {renumber.score:.1f} if renumbered, {keep.score:.1f} if kept, "
            f"at {keep.tokens}{unit} ({keep.source})"
        )
    return found
