"""A judged run as lines for people; what is special to a benchmark comes from its grader."""

from collections.abc import Iterator, Mapping
from typing import Any

from llava_consensus.evaluation.judge import graders


def lines(metrics: Mapping[str, Any]) -> Iterator[str]:
    """Headline, the grader's own lines, scores computed without a judge, who judged, and what became of replies."""
    counts, replies, judge = metrics["counts"], metrics["replies"], metrics["judge"]
    grader = graders.get(metrics["benchmark"])
    score = "none" if metrics["score"] is None else f"{metrics['score']:.2f}"
    answers = f"{counts['graded']} of {counts['asked']} questions graded"
    yield f"{metrics['benchmark']}: {metrics['metric']} {score}, {answers}"
    yield from grader.summary(metrics)
    unjudged = grader.unjudged_summary(metrics)
    if unjudged is not None:
        agreement = metrics.get("agreement")
        yield unjudged + ("" if agreement is None else f", {agreement:.1f} % as the unpruned model answered")
    reported = ", ".join(f"{name} ({count} replies)" for name, count in judge["reported"].items()) or "nobody"
    yield f"judge: {reported}; prompt: {judge['prompt']['official'] or judge['prompt']['origin']}"
    odd = f"{replies['refused']} refused, {replies['unreadable']} unreadable, {replies['given_up']} given up"
    lost = f"{replies['failed_tries']} failed tries, {replies['in_flight']} cut off by a stop"
    yield f"replies: {replies['used']} used, {odd}; {lost} (these may have been charged)"
