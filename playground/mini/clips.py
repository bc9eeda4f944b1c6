"""Short clips: a few objects of a scene drift over a still background, eight frames long, written as real video files.

    clip("test", 6000).frames()[0]        # the first frame, a Scene like any other

A clip is seeded like a scene and its first frame is drawn like one, from a range of indices of its own. In no frame do
objects overlap or leave the picture, so that a question about what is there has one answer from start to end. In a
`brief_clip` the sign and the small things are seen in one frame each, among large and moving ones that stay, so that
few of a clip's patches show what is asked about.
"""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path

import numpy as np
from PIL import Image

from playground.mini.scenes import SPLITS, Item, Scene, Sign, background, draw, sample

FRAMES, RATE = 8, 4  # frames of a clip, and how many are shown in a second
SPEEDS = (0, 2, 3, 4)  # units a frame, in each direction
TOUCH = 1  # units by which boxes may overlap, as in any scene


@dataclasses.dataclass(frozen=True)
class Clip:
    """A scene and how far each of its objects moves from frame to frame, in units."""

    scene: Scene
    steps: tuple[tuple[int, int], ...]
    only: tuple[int | None, ...] = ()  # the one frame in which an object, and last the sign, is seen; None is all

    def at(self, time: int) -> Scene:
        items = [_moved(item, step, time) for item, step in zip(self.scene.items, self.steps, strict=True)]
        if not self.only:
            return dataclasses.replace(self.scene, items=tuple(items))
        *of_items, of_sign = (frame in (None, time) for frame in self.only)
        seen = tuple(item for item, shown in zip(items, of_items, strict=True) if shown)
        return dataclasses.replace(self.scene, items=seen, sign=self.scene.sign if of_sign else None)

    def frames(self) -> list[Scene]:
        return [self.at(time) for time in range(FRAMES)]


def _moved(item: Item, step: tuple[int, int], time: int) -> Item:
    return dataclasses.replace(item, x=item.x + step[0] * time, y=item.y + step[1] * time)


def _meet(one: Item, other: Item | Sign) -> bool:
    width, height = (other.width, other.height) if isinstance(other, Sign) else (other.size, other.size)
    return (
        one.x < other.x + width - TOUCH
        and other.x < one.x + one.size - TOUCH
        and one.y < other.y + height - TOUCH
        and other.y < one.y + one.size - TOUCH
    )


def _free(moving: Item, step: tuple[int, int], others: list[tuple[Item, tuple[int, int]]], scene: Scene) -> bool:
    """Whether an object that moves so stays in the picture and clear of the sign and of the objects placed before."""
    for time in range(FRAMES):
        one = _moved(moving, step, time)
        there: list[Item | Sign] = [_moved(other, at, time) for other, at in others]
        there += [scene.sign] if scene.sign else []
        if not (0 <= one.x <= scene.width - one.size and 0 <= one.y <= scene.height - one.size):
            return False
        if any(_meet(one, other) for other in there):
            return False
    return True


def clip(split: str, index: int) -> Clip:
    """Clip number `index` of a split: three to five objects, most of them moving."""
    return _drifting(sample(SPLITS[split] + index, least=3, most=5, sign_rate=0.4))


def brief_clip(split: str, index: int) -> Clip:
    """Clip number `index` of a split, of five to seven objects: the sign and the small objects of which there is one
    stand in one frame each, drawn at random, and the others move through all of them.
    """
    moving = _drifting(sample(SPLITS[split] + index, least=5, most=7, sign_rate=0.7))
    items, rng = moving.scene.items, random.Random(moving.scene.seed + 1)
    names = [item.name for item in items]
    brief = [not item.large and names.count(item.name) == 1 for item in items]
    only = tuple(rng.randrange(FRAMES) if one else None for one in (*brief, True))
    steps = [(0, 0) if one else step for one, step in zip(brief, moving.steps, strict=True)]
    for number in [number for number, one in enumerate(brief) if not one]:  # none comes over what is seen meanwhile
        met = [(item, time) for item, time in zip(items, only, strict=False) if time is not None]
        if any(_meet(_moved(items[number], steps[number], time), item) for item, time in met):
            steps[number] = (0, 0)
    return Clip(moving.scene, tuple(steps), only)


def _drifting(scene: Scene) -> Clip:
    rng = random.Random(scene.seed)
    others: list[tuple[Item, tuple[int, int]]] = []
    for number, item in enumerate(scene.items):
        still = [(other, (0, 0)) for other in scene.items[number + 1 :]]
        steps = [(rng.choice(SPEEDS) * rng.choice((-1, 1)), rng.choice(SPEEDS) * rng.choice((-1, 1))) for _ in range(8)]
        fitting = [step for step in steps if _free(item, step, [*others, *still], scene)]
        others.append((item, fitting[0] if fitting else (0, 0)))
    return Clip(scene, tuple(step for _, step in others))


def pictures(clip_: Clip, scale: int = 2) -> list[Image.Image]:
    """The frames at `scale` pixels a unit."""
    scene = clip_.scene
    ground = background(scene.seed, scene.width * scale, scene.height * scale)
    return [draw(Image.fromarray(ground), frame, scale) for frame in clip_.frames()]


def write_video(path: Path, clip_: Clip) -> None:
    """The clip as an H.264 .mp4 file; the same bytes every time."""
    import av

    path.parent.mkdir(parents=True, exist_ok=True)
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=RATE, options={"crf": "18", "preset": "veryfast", "threads": "1"})
        stream.width, stream.height, stream.pix_fmt = clip_.scene.width * 2, clip_.scene.height * 2, "yuv420p"
        for image in pictures(clip_):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(np.asarray(image), format="rgb24")))
        container.mux(stream.encode())
