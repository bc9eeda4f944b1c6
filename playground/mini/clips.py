"""Short clips: a few objects of a scene drift over a still background, eight frames long, written as real video files.

    clip("test", 6000).frames()[0]        # the first frame, a Scene like any other

A clip is seeded like a scene and its first frame is drawn like one, from a range of indices of its own. In no frame do
objects overlap or leave the picture, so that a question about what is there has one answer from start to end.
"""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path

import numpy as np
from PIL import Image

from playground.mini.scenes import SPLITS, Item, Scene, background, draw, sample

FRAMES, RATE = 8, 4  # frames of a clip, and how many are shown in a second
SPEEDS = (0, 2, 3, 4)  # units a frame, in each direction
TOUCH = 1  # units by which boxes may overlap, as in any scene


@dataclasses.dataclass(frozen=True)
class Clip:
    """A scene and how far each of its objects moves from frame to frame, in units."""

    scene: Scene
    steps: tuple[tuple[int, int], ...]

    def at(self, time: int) -> Scene:
        """The scene of frame `time`."""
        items = tuple(_moved(item, step, time) for item, step in zip(self.scene.items, self.steps, strict=True))
        return dataclasses.replace(self.scene, items=items)

    def frames(self) -> list[Scene]:
        """The scenes of all frames."""
        return [self.at(time) for time in range(FRAMES)]


def _moved(item: Item, step: tuple[int, int], time: int) -> Item:
    return dataclasses.replace(item, x=item.x + step[0] * time, y=item.y + step[1] * time)


def _free(moving: Item, step: tuple[int, int], others: list[tuple[Item, tuple[int, int]]], scene: Scene) -> bool:
    """Whether an object that moves so stays in the picture and clear of the sign and of the objects placed before."""
    sign = scene.sign
    for time in range(FRAMES):
        one = _moved(moving, step, time)
        boxes = [(o.x, o.y, o.size, o.size) for o in (_moved(other, at, time) for other, at in others)]
        boxes += [(sign.x, sign.y, sign.width, sign.height)] if sign else []
        if not (0 <= one.x <= scene.width - one.size and 0 <= one.y <= scene.height - one.size):
            return False
        if any(
            one.x < x + w - TOUCH
            and x < one.x + one.size - TOUCH
            and one.y < y + h - TOUCH
            and y < one.y + one.size - TOUCH
            for x, y, w, h in boxes
        ):
            return False
    return True


def clip(split: str, index: int) -> Clip:
    """Clip number `index` of a split: three to five objects, most of them moving."""
    scene = sample(SPLITS[split] + index, least=3, most=5, sign_rate=0.4)
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
