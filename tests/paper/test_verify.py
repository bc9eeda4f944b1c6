"""All tokens are held to published scores by the interval of the run."""

from pathlib import Path

import pytest
from run_folders import store

from llava_consensus.errors import DataError
from llava_consensus.evaluation.report.rows import read_row
from llava_consensus.paper.verify import verify_table


@pytest.mark.parametrize(
    ("published", "same"), [(75.0, True), (85.0, True), (61.5, True), (50.0, False), (95.0, False)]
)
def test_a_published_score_is_within_the_interval_or_refused(tmp_path: Path, published: float, same: bool) -> None:
    run = read_row(store(tmp_path, [1] * 30 + [0] * 10, method="full", tokens=None))
    if not same:
        with pytest.raises(DataError, match=r"gqa 75\.0 ± 1\d\.\d, published"):
            verify_table([run], {"gqa": published}, {})
        return
    (line,) = verify_table([run], {"gqa": published}, {"gqa": 4000}).groups[0].lines
    assert line[1:4] == ("40 (40)", line[2], f"{published:.1f}") and line[5] == "as published"
    assert float(line[4]) == pytest.approx(float(line[2].split(" ± ")[1]) / 10, abs=0.1)  # of a hundred times as many


def test_nothing_is_said_where_nothing_was_published(tmp_path: Path) -> None:
    (line,) = verify_table([read_row(store(tmp_path, [1] * 5, method="full", tokens=None))], {}, {}).groups[0].lines
    assert line[3] == "-" and line[5] == "nothing published"
