"""TGIF-QA (FrameQA): 13,691 questions on animated pictures, the first 1,000 or all.

Data: DATA/eval/GPT_Zero_Shot_QA/TGIF_Zero_Shot_QA: `test_q.json`, `test_a.json`, the GIFs as videos in `mp4`.
Asked, scored and exported as `video_qa.py` says.
Must match: Video-LLaVA-7B, all questions, judge gpt-3.5-turbo: accuracy and score 70.0 and 4.0
(https://arxiv.org/abs/2311.10122, table 3); the judge's alias has moved since, so compare numbers of one judge only.
"""

from dataclasses import dataclass

from llava_consensus.evaluation.benchmarks.video_qa import VideoQA


@dataclass(frozen=True, kw_only=True)
class TGIF(VideoQA):
    """TGIF-QA (FrameQA)."""

    name = "tgif"
    title = "TGIF"
    line = "TGIF-QA (FrameQA): short questions on short videos, right or wrong by a judge model"
    folder = "GPT_Zero_Shot_QA/TGIF_Zero_Shot_QA"
    images = "mp4"
    column = "tgif_acc"
    total = 13_691
