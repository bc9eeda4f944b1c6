"""The ledger: published results, every budget by one account. Run: `pytest tests/paper/test_ledger.py`."""

import csv
import io

import pytest

from llava_consensus import cli
from llava_consensus.cli.paper import price
from llava_consensus.errors import OptionError
from llava_consensus.paper import ledger
from llava_consensus.paper.ledger import Accounted
from llava_consensus.reduction.costs import SHAPES

DEPTH = 32


@pytest.fixture(scope="module")
def rows() -> list[Accounted]:
    return [ledger.account(entry, DEPTH, price) for entry in ledger.entries()]


def one(rows: list[Accounted], method: str, tokens: int) -> Accounted:
    (found,) = (row for row in rows if (row.entry.method, row.entry.tokens) == (method, tokens))
    return found


def test_64_tokens_after_a_cut_at_layer_10_are_224_in_the_layer_mean(rows: list[Accounted]) -> None:
    row = one(rows, "DIPrune", 64)
    assert row.layers == [576] * 10 + [64] * 22
    assert row.average == 224


def test_32_tokens_of_two_stages_are_107_in_the_layer_mean(rows: list[Accounted]) -> None:
    """Of a method that keeps 200 to 300 tokens up to layer 11."""
    row = one(rows, "OccamToken", 32)
    assert row.layers is not None and row.layers[10:12] == [250, 32]
    assert row.average == pytest.approx(107, abs=0.5)
    assert row.bounds == pytest.approx((90, 124), abs=0.5)


def test_published_schedules_of_sparsevlm_have_the_means_that_running_its_code_gave(rows: list[Accounted]) -> None:
    means = {row.entry.tokens: row.average for row in rows if row.entry.method == "SparseVLM" and row.average}
    assert means == pytest.approx({192: 206.5, 128: 145.4, 64: 82.25}, abs=0.05)


def test_every_row_has_a_source_and_a_schedule_or_says_that_there_is_none(rows: list[Accounted]) -> None:
    assert len(rows) >= 20
    assert all(row.entry.source for row in rows)
    shares = [row for row in rows if row.entry.model in ledger.PERCENT]
    read = ("own file", "read in a summary")
    assert shares and all(row.layers is None and row.entry.source.endswith((*read, f"; {read[0]}")) for row in shares)
    unknown = [row for row in rows if row.layers is None and row not in shares]
    assert unknown and all(ledger.UNPUBLISHED in row.entry.note and row.cost is None for row in unknown)
    assert not any(ledger.UNPUBLISHED in row.entry.note for row in rows if row.layers)
    assert all(len(row.layers) == DEPTH and row.entry.stages[0].layer == 0 for row in rows if row.layers)  # type: ignore[index]


def test_costs_are_those_of_our_account(rows: list[Accounted]) -> None:
    full = one(rows, "LLaVA-1.5-7B", 576)
    assert full.cost is not None
    assert full.cost.kv_bytes == 2**19 * (576 + SHAPES["llava-1.5-7b"].text)
    costs = {name: one(rows, name, tokens).cost for name, tokens in (("DIPrune", 64), ("OccamToken", 32))}
    assert full.cost.flops > costs["DIPrune"].flops > costs["OccamToken"].flops  # type: ignore[union-attr]


@pytest.mark.parametrize(("key", "falling"), [("average", False), ("flops", False), ("tokens", False), ("gqa", True)])
def test_any_column_sorts_and_unknown_values_come_last(rows: list[Accounted], key: str, falling: bool) -> None:
    values = [ledger.KEYS[key].read(row) for row in ledger.ordered(rows, key)]
    known = [value for value in values if value is not None]
    assert values[: len(known)] == sorted(known, reverse=falling) and len(values) == len(rows)


def test_an_unknown_column_is_an_error(rows: list[Accounted]) -> None:
    with pytest.raises(OptionError, match=r"unknown column 'averag'. Did you mean 'average'"):
        ledger.ordered(rows, "averag")


def test_the_command_prints_markdown_latex_and_csv(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["paper", "ledger", "--sort", "kv_bytes"]) == 0
    shown = capsys.readouterr().out
    assert "| DIPrune | 64 | 576 | 64 | 224 |" in shown and "106.9 (90 to 124)" in shown
    assert cli.main(["paper", "ledger", "--format", "latex"]) == 0
    assert r"\begin{tabular}" in capsys.readouterr().out
    assert cli.main(["paper", "ledger", "--format", "csv"]) == 0
    lines = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert len(lines) == len(ledger.entries())
    assert [line["average"] for line in lines if line["method"] == "DIPrune"] == ["224.0"]
