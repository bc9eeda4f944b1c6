"""A study's and a bench's files with made-up numbers, for tests of what is drawn and judged from them."""

from itertools import product
from typing import Any

RATES = (0.1, 0.3, 0.5)
STUDENTS = ("vision", "cross")


def contrast(of: str, difference: float, p: float = 0.0001, pictures: int = 50, **setting: Any) -> dict[str, Any]:
    """A contrast of a study's file, its interval two points wide."""
    few = pictures < 10
    measured = {"interval": None if few else [difference - 1, difference + 1], "p": None if few else p}
    return {"of": of, "difference": difference, **measured, "pictures": pictures, **setting}


def study(gain: float = 2.0, slope: float = -0.3, pictures: int = 50) -> dict[str, Any]:
    """study.json of two benchmarks under both position policies: every recovery gains `gain`, give or take one;
    correction moves with the rate.
    """
    rows, contrasts = [], []
    for name, scale in (("pope", 1.0), ("gqa", 1.0)):
        shared = {"benchmark": name, "title": name.upper(), "metric": "accuracy", "scale": scale}
        shared |= {"questions": 100, "pictures": pictures}
        rows.append(_row(shared, 1.0, "full", 85.0, positions=None))
        for policy, retention in product(("keep", "renumber"), (0.25, 0.5)):
            own = {"positions": policy}
            rows += [_row(shared, retention, "vision", 80.0, **own), _row(shared, retention, "cross", 77.0, **own)]
            for student, rate in product(STUDENTS, RATES):
                row = _row(shared, retention, "recovery", 80.0 + gain, student=student, rate=rate, **own)
                row |= {"correction": 0.8 + slope * rate, "gain": gain, "gain_interval": [gain - 1, gain + 1]}
                rows.append(row)
    for policy, retention in product(("keep", "renumber"), (0.25, 0.5)):
        at = {"positions": policy, "retention": retention, "pictures": pictures}
        contrasts.append(contrast("sides", 3.0, student=None, rate=None, **at))
        for student, rate in product(STUDENTS, RATES):
            one = {**at, "student": student, "rate": rate}
            contrasts += [contrast("gain", gain, p=0.0001 if abs(gain) > 1 else 0.5, **one)]
            contrasts += [contrast("fall", -20 * slope, **one)]
    return {"description": {"model": "made up"}, "rows": rows, "contrasts": contrasts}


def _row(shared: dict[str, Any], retention: float, scores: str, accuracy: float, **more: Any) -> dict[str, Any]:
    disagreement = None if scores == "full" else 1.0 - retention
    nothing = dict.fromkeys(("student", "rate", "correction", "gain", "gain_interval", "p"))
    own = {"retention": retention, "scores": scores, "accuracy": accuracy, "disagreement": disagreement}
    return {**shared, **nothing, **own, "interval": [accuracy - 2, accuracy + 2], **more}


def scap(late: bool = True, pictures: int = 50) -> dict[str, Any]:
    """scap.json in which the rotated probe leans toward late patches, or toward early ones."""
    rising = [0.5 + place / 23 for place in range(24)]
    saliencies = {True: rising if late else rising[::-1], False: [1.0] * 24}
    positions = [{"rotated": rotated, "saliency": saliency} for rotated, saliency in saliencies.items()]
    contrasts = [contrast(of, 40.0 if late else -40.0, pictures=pictures) for of in ("late", "rotation")]
    about = {"description": {}, "benchmark": "gqa", "questions": 100, "pictures": pictures, "retention": 0.25}
    return {**about, "positions": positions, "contrasts": contrasts}


def bench(model: str = "llava-mini") -> dict[str, Any]:
    """A bench file of three methods at two budgets, its times a straight line over the tokens."""
    rows = [_measured("full", "full", 576)]
    for method, title in (("consensusdrop", "consensusdrop"), ("vispruner", "VisPruner"), ("sparsevlm", "SparseVLM")):
        rows += [_measured(method, title, tokens) for tokens in (288, 128, 64)]
    return {"model": model, "machine": {"device": "cpu"}, "protocol": {}, "rows": rows}


def _measured(method: str, title: str, tokens: int) -> dict[str, Any]:
    time = 20.0 + tokens / 10
    about = {"method": method, "title": title, "tokens": tokens, "reduction_percent": 100 * (1 - tokens / 576)}
    times = {"ttft_ms": time, "speedup": 77.6 / time, "share": 0.01}
    return {**about, **times, "kv_bytes": 20000 * tokens, "peak_bytes": None, "paper": {"flops": 1e9 * tokens}}
