"""MSRVTT-QA: 72,821 questions on clips of 10 to 30 seconds, the first 1,000 or all.

Data: DATA/eval/GPT_Zero_Shot_QA/MSRVTT_Zero_Shot_QA: `test_q.json`, `test_a.json`, videos in `videos/all`.
Asked, scored and exported as `video_qa.py` says.
Must match: Video-LLaVA-7B, all questions, judge gpt-3.5-turbo: accuracy and score 59.2 and 3.5
(https://arxiv.org/abs/2311.10122, table 3); the judge's alias has moved since, so compare numbers of one judge only.
"""

from dataclasses import dataclass

from llava_consensus.evaluation.benchmarks.video_qa import VideoQA


@dataclass(frozen=True, kw_only=True)
class MSRVTT(VideoQA):
    """MSRVTT-QA."""

    name = "msrvtt"
    title = "MSRVTT"
    line = "MSRVTT-QA: short questions on short videos, right or wrong by a judge model"
    folder = "GPT_Zero_Shot_QA/MSRVTT_Zero_Shot_QA"
    images = "videos/all"
    column = "msrvtt_acc"
    total = 72_821
