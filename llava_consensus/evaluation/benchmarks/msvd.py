"""MSVD-QA: 13,157 questions on clips of a few seconds, the first 1,000 or all.

Data: DATA/eval/GPT_Zero_Shot_QA/MSVD_Zero_Shot_QA: `test_q.json`, `test_a.json`, videos in `videos`.
Asked, scored and exported as `video_qa.py` says.
Must match: Video-LLaVA-7B, all questions, judge gpt-3.5-turbo: accuracy and score 70.7 and 3.9
(https://arxiv.org/abs/2311.10122, table 3); the judge's alias has moved since, so compare numbers of one judge only.
"""

from dataclasses import dataclass

from llava_consensus.evaluation.benchmarks.video_qa import VideoQA


@dataclass(frozen=True, kw_only=True)
class MSVD(VideoQA):
    """MSVD-QA."""

    name = "msvd"
    title = "MSVD"
    line = "MSVD-QA: short questions on short videos, right or wrong by a judge model"
    folder = "GPT_Zero_Shot_QA/MSVD_Zero_Shot_QA"
    images = "videos"
    column = "msvd_acc"
    total = 13_157
