"""`bench --serve`: engines take turns under requests."""

from pathlib import Path

import pytest
import small

from llava_consensus.evaluation.bench import serving
from llava_consensus.evaluation.bench.serving import Asked, Case, Load
from llava_consensus.serving.setting import Setting


def test_a_table_gives_medians_and_ratios_within_a_round() -> None:
    def record(number: int, case: str, tokens: int | None, rate: float) -> dict[str, float | str | None]:
        times = {"first_token_p50": 1 / rate, "first_token_p99": 2 / rate, "per_token": 0.1, "blocks": 7, "running": 2}
        named = {"round": number, "case": case, "tokens": tokens, "load": "2 at once"}
        return {**named, "requests_per_second": rate, "processor_seconds": 1 / rate, **times}

    rounds = [(10, 20), (1, 3), (100, 500)]  # ratios 2, 3 and 5
    records = [
        one
        for number, (plain, own) in enumerate(rounds)
        for one in (record(number, "plain", None, plain), record(number, "visionzip", 64, own))
    ]
    *_, plain_line, line = serving.lines(records)
    assert plain_line.startswith("| plain | all | 2 at once | 100 (1.00) | 10.00 (1.00) | 100, 200 (1.00) |")
    assert line == "| visionzip | 64 | 2 at once | 50 (0.33) | 20.00 (3.00) | 50, 100 (0.33) | 100.0 (1.00) | 7 | 2 |"


@pytest.mark.vllm
@pytest.mark.slow
def test_fewer_tokens_take_fewer_blocks_and_a_cache_holds_more_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in small.ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    small.llava(tmp_path)
    serving.rename_tower(tmp_path)
    words = " ".join(f"w{number}" for number in range(9, 29))
    asked = Asked(f"<image> {words}", [small.picture(1)], length=4, blocks=5)
    cases = [Case("plain", None), Case("visionzip", Setting("visionzip", 5), 5)]
    settings = {"dtype": "float32", "enforce_eager": True, "max_model_len": 64, "max_num_seqs": 8}
    loads = [Load(6, at_once=6), Load(3, rate=50)]
    found = list(serving.measure(str(tmp_path), cases, loads, asked, 1, settings))
    assert [(one["case"], one["load"]) for one in found] == [
        (case, load) for load in ("6 at once", "50 a second") for case in ("plain", "visionzip")
    ]
    # 36 + 4 tokens are two blocks of 32, 25 + 4 are one; a cache of five has one that holds nothing
    assert [(one["blocks"], one["running"]) for one in found[:2]] == [(4, 2), (4, 4)]
    assert all(one["first_token_p99"] >= one["first_token_p50"] > 0 for one in found)
