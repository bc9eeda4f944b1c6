"""Scenes are seeded and their splits disjoint; building the benchmark files is idempotent."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest

from playground.mini import build as builder
from playground.mini.scenes import SPLITS, render, scene


def test_scenes_are_seeded_and_splits_disjoint() -> None:
    assert scene("test", 3) == scene("test", 3)
    assert np.array_equal(np.asarray(render(scene("test", 3))), np.asarray(render(scene("test", 3))))
    bases = sorted(SPLITS.values())
    assert all(b - a >= 10**9 for a, b in itertools.pairwise(bases))
    with pytest.raises(ValueError, match="outside"):
        scene("train", 10**9)
    seen = {split: {scene(split, i).seed for i in range(200)} for split in SPLITS}
    assert not seen["train"] & seen["test"] and not seen["val"] & seen["test"] and not seen["train"] & seen["val"]


def test_build_is_idempotent_and_leaves_videos_out_without_pyav(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        builder, "BUILDERS", dict.fromkeys(("gqa", builder.VIDEOS), lambda path: path.mkdir(parents=True))
    )
    for there, names in ((None, ["gqa"]), (object(), [builder.VIDEOS, "gqa"])):
        monkeypatch.setattr(builder, "find_spec", lambda name, there=there: there)
        assert builder.build(tmp_path) and not builder.build(tmp_path)
        assert sorted(path.name for path in (tmp_path / "eval").iterdir() if path.is_dir()) == names
    (tmp_path / "eval" / ".complete").write_text("older sources")
    assert builder.build(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["eval"]
