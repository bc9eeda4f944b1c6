"""MSVD-QA: 13,157 questions on clips of a few seconds, the first 1,000 or all.

Data: DATA/eval/GPT_Zero_Shot_QA/MSVD_Zero_Shot_QA: `test_q.json`, `test_a.json`, videos in `videos`.
Asked, scored and exported as `video_qa.py` says.
Must match: Video-LLaVA-7B, all questions, judge gpt-3.5-turbo: accuracy and score 70.7 and 3.9
(https://arxiv.org/abs/2311.10122, table 3); the judge's alias has moved since, so compare numbers of one judge only.
"""

from llava_consensus.benchmarks import video_qa

MSVD = video_qa.benchmark("msvd", "MSVD-QA", "GPT_Zero_Shot_QA/MSVD_Zero_Shot_QA", "videos", 13_157)
