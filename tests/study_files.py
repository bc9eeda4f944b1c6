"""A study's and a bench's files with made-up numbers, for tests of what is drawn and judged from them."""

from typing import Any


def study(gain: float = 2.0, slope: float = -0.3) -> dict[str, Any]:
    """study.json of two benchmarks: every recovery gains `gain`, give or take one; correction moves with the rate."""
    rows = []
    for name, scale in (("pope", 1.0), ("gqa", 1.0)):
        shared = {"benchmark": name, "title": name.upper(), "metric": "accuracy", "scale": scale, "questions": 50}
        rows.append(_row(shared, 1.0, "full", 85.0))
        for retention in (0.25, 0.5):
            rows += [_row(shared, retention, "vision", 80.0), _row(shared, retention, "cross", 77.0)]
            for student in ("vision", "cross"):
                for rate in (0.1, 0.3, 0.5):
                    row = _row(shared, retention, "recovery", 80.0 + gain, student=student, rate=rate)
                    row |= {"correction": 0.8 + slope * rate, "gain": gain, "gain_interval": [gain - 1, gain + 1]}
                    rows.append(row)
    return {"description": {"model": "made up"}, "rows": rows}


def _row(shared: dict[str, Any], retention: float, scores: str, accuracy: float, **more: Any) -> dict[str, Any]:
    disagreement = None if scores == "full" else 1.0 - retention
    nothing = dict.fromkeys(("student", "rate", "correction", "gain", "gain_interval", "p"))
    return {
        **shared,
        **nothing,
        "retention": retention,
        "scores": scores,
        "accuracy": accuracy,
        "interval": [accuracy - 2, accuracy + 2],
        "disagreement": disagreement,
        **more,
    }


def scap(late: bool = True) -> dict[str, Any]:
    """scap.json in which the rotated probe leans toward late patches, or toward early ones."""
    rising = [0.5 + place / 23 for place in range(24)]
    positions = [
        {"rotated": True, "saliency": rising if late else rising[::-1]},
        {"rotated": False, "saliency": [1.0] * 24},
    ]
    return {
        "description": {},
        "benchmark": "gqa",
        "questions": 50,
        "retention": 0.25,
        "layers": [],
        "positions": positions,
    }


def bench(model: str = "llava-mini") -> dict[str, Any]:
    """A bench file of three methods at two budgets, its times a straight line over the tokens."""
    rows = [_measured("full", "full", 576)]
    for method, title in (("consensusdrop", "consensusdrop"), ("vispruner", "VisPruner"), ("sparsevlm", "SparseVLM")):
        rows += [_measured(method, title, tokens) for tokens in (288, 128, 64)]
    return {"model": model, "machine": {"device": "cpu"}, "protocol": {}, "rows": rows}


def _measured(method: str, title: str, tokens: int) -> dict[str, Any]:
    time = 20.0 + tokens / 10
    return {
        "method": method,
        "title": title,
        "tokens": tokens,
        "reduction_percent": 100 * (1 - tokens / 576),
        "ttft_ms": time,
        "speedup": 77.6 / time,
        "share": 0.01,
        "kv_bytes": 20000 * tokens,
        "peak_bytes": None,
        "paper": {"flops": 1e9 * tokens},
    }


def growth() -> dict[str, Any]:
    """A file of `bench --growth` with two methods, one of which stops half way."""
    points = [
        {
            "curve": curve,
            "method": method,
            "patches": patches,
            "tokens": 64,
            "batch": number + 1,
            "merged": 5 * patches,
            "ms": None if method == "vispruner" and number else 0.1 * patches,
            "bytes": 4 * patches**2,
            "reason": "",
        }
        for curve in ("fixed", "ninth", "batch", "merged")
        for number, patches in enumerate((576, 2304))
        for method in ("consensusdrop", "vispruner")
    ]
    return {"points": points}
