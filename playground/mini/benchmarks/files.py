"""What every builder writes with: JSON lines, whole JSON files, pictures, and the line of a LLaVA question file.

`TEST` gives each benchmark a range of test scenes of its own.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from playground.mini.scenes import Scene, render, scene

TEST = {  # indices of test scenes; of clips for the videos
    "gqa": range(0, 50),
    "pope": range(1000, 1400),
    "textvqa": range(2000, 2600),
    "vqav2": range(3000, 3060),
    "scienceqa": range(3500, 3660),
    "MME": range(4000, 4400),
    "mmbench": range(4440, 4600),
    "mmbench_cn": range(4600, 4670),
    "mm-vet": range(4700, 4740),
    "seed_bench": range(5000, 5300),
    "seed_clips": range(5500, 5600),
    "TGIF": range(6000, 6040),
    "MSVD": range(6100, 6140),
    "MSRVTT": range(6200, 6240),
    "brief": range(6300, 6340),
    "gqa, large": range(10_000, 10_250),
    "pope, large": range(11_000, 12_000),
    "vqav2, large": range(12_000, 12_300),
}


def scenes(benchmark: str, split: str) -> Iterator[tuple[int, Scene]]:
    """The scenes of a benchmark with their indices: of the split `large` test scenes too, in a range of their own."""
    large = split == "large"
    for index in TEST[f"{benchmark}, large" if large else benchmark]:
        yield index, scene("test" if large else split, index)


def write_lines(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """A JSON-lines file, with its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_json(path: Path, value: Any, indent: int | None = None) -> None:
    """A JSON file, with its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=indent))


def picture(path: Path, scene_: Scene) -> None:
    """A scene as a PNG of one pixel a unit or, whatever else its name ends in, as a JPEG of two."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".png":
        render(scene_, scale=1).save(path, compress_level=1)
    else:
        render(scene_).save(path, format="JPEG", quality=92)


def line(question_id: int | str, image: str, text: str, category: str = "default") -> dict[str, Any]:
    """A line of a LLaVA question file."""
    return {"question_id": question_id, "image": image, "text": text, "category": category}
