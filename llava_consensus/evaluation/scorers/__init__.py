"""Scorers: pure text functions, one file per family, each equal to an official script to the last bit.

A scorer takes texts and references and returns numbers together with what it read out of every answer. It opens no
file and knows no benchmark; `llava_consensus.evaluation.benchmarks` reads the files and joins answers to references.
`gqa` GQA's report; `pope` yes/no answers; `vqa_text` open answers against ten references (TextVQA);
`mm_vet` and `video_qa` what a judge replied; `match` matches that need no judge.
Checked by `pytest tests/test_scorers.py` against cases scored by the official code.
"""

from llava_consensus.evaluation.scorers.base import Score, mean

__all__ = ["Score", "mean"]
