"""Frames of a video file as pictures or a clip, sampled as Video-LLaVA samples them, or one line that says why not.

`count` frames at equal steps from the first to the last: frame `int(i * (n - 1) / (count - 1))` of n, so a video of one
frame shows it `count` times. Nothing is flipped (Video-LLaVA flips half of the videos at random even when it
evaluates). Any container and codec that PyAV reads (`pip install 'llava-consensus[video]'`); an animated GIF is read by
Pillow. Files are decoded once, and no more than the wanted frames are kept in memory.

    from llava_consensus.evaluation.runs.videos import read_clip
    clip = read_clip("clip.mp4", 8)
"""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from PIL import Image

from llava_consensus.errors import ImageError, missing_extra
from llava_consensus.evaluation.runs.pictures import check_file, check_size, open_header, reason
from llava_consensus.hosts.base import Clip

# demuxers of files that name no other file
FORMATS = "mov,matroska,webm,avi,mpegts,mpeg,mpegvideo,flv,asf,ogg,gif,h264,hevc,rm,mjpeg,ivf,dv,mxf,wav,mp3"
INTACT = 0.9  # of the frames that the head of a file promises; with fewer it counts as cut off


def decoder() -> ModuleType:
    """PyAV, or a MissingDependency with the line to type."""
    try:
        import av
    except ImportError as error:
        raise missing_extra("reading videos needs PyAV (av)", "video") from error
    av.logging.set_level(None)  # what goes wrong is raised; the codecs' own chatter helps nobody
    module: ModuleType = av
    return module


def sample_places(length: int, count: int) -> list[int]:
    """Which of `length` frames are shown: `count` of them, ascending, first and last included."""
    places: list[int] = np.linspace(0, length - 1, count, dtype=int).tolist()
    return places


def read_frames(path: str | Path, count: int) -> list[Image.Image]:
    """`count` frames of a video as RGB pictures; ImageError names the file that cannot be read."""
    return list(read_clip(path, count).frames)


def read_clip(path: str | Path, count: int) -> Clip:
    """`count` frames of a video, RGB, and where they stand in it; ImageError names the file that cannot be read."""
    path = Path(path)
    check_file(path, "video")
    try:
        with open(path, "rb") as file:
            content = file.read() if file.read(4) == b"GIF8" else None
    except OSError as error:
        raise ImageError(f"{path}: cannot be read ({error.strerror})") from error
    return _from_video(path, count) if content is None else _from_gif(path, content, count)


def _from_gif(path: Path, content: bytes, count: int) -> Clip:
    with open_header(path) as animation:
        check_size(path, animation.size)
        if not content.rstrip(b"\0").endswith(b";"):  # Pillow would show what is left
            raise ImageError(f"{path}: damaged or cut off (no end mark)")
        try:
            shown, milliseconds = [], 0.0
            length = getattr(animation, "n_frames", 1)
            places = sample_places(length, count)
            for place in places:
                animation.seek(place)
                shown.append(animation.convert("RGB"))
                milliseconds += animation.info.get("duration", 0) / count
            return Clip(tuple(shown), tuple(places), length, 1000 / milliseconds if milliseconds else None)
        except Exception as error:  # decoders fail in many ways, and each means that the file is damaged
            raise ImageError(f"{path}: damaged or cut off ({reason(error)})") from error


def _from_video(path: Path, count: int) -> Clip:
    av = decoder()
    try:
        length, rate = _length(av, path)
        kept, decoded = _pick(av, path, sample_places(length, count))
        if 0 < decoded < length:  # packets without a frame of their own, as old .avi files have them
            length = decoded
            kept, decoded = _pick(av, path, sample_places(length, count))
    except (av.FFmpegError, OSError, ValueError) as error:
        raise ImageError(f"{path}: not a video, damaged or cut off ({reason(error)})") from error
    if not decoded:
        raise ImageError(f"{path}: a video without a single readable frame")
    places = sample_places(length, count)
    return Clip(tuple(kept[place] for place in places), tuple(places), length, rate)


def _open(av: ModuleType, path: Path) -> Any:
    """The file by a demuxer that opens no other one, as those of lists and playlists (concat, HLS, DASH) do."""
    return av.open(str(path.absolute()), options={"format_whitelist": FORMATS, "protocol_whitelist": "file"})


def _length(av: ModuleType, path: Path) -> tuple[int, float | None]:
    """Number of coded frames, counted without decoding, and how many a second has, where the file says so. ImageError
    for a file that is no video or is cut off.
    """
    with closing(_open(av, path)) as container:
        if not container.streams.video:
            raise ImageError(f"{path}: no video stream in it")
        stream = container.streams.video[0]
        check_size(path, (stream.codec_context.width, stream.codec_context.height))
        length = sum(packet.size > 0 for packet in container.demux(stream))
        if length < INTACT * stream.frames:
            raise ImageError(f"{path}: cut off, {length} of {stream.frames} frames are there")
        rate = stream.average_rate
    return max(length, 1), float(rate) if rate else None


def _pick(av: ModuleType, path: Path, places: list[int]) -> tuple[dict[int, Image.Image], int]:
    """The frames at `places` (ascending), and how many there are up to the last that was decoded."""
    kept: dict[int, Image.Image] = {}
    decoded, wanted = 0, set(places)
    with closing(_open(av, path)) as container:
        for decoded, frame in enumerate(_decode(container), start=1):
            if decoded - 1 in wanted:
                kept[decoded - 1] = frame.to_image().convert("RGB")
            if decoded > places[-1]:
                break
    return kept, decoded


def _decode(container: Any) -> Iterator[Any]:
    stream = container.streams.video[0]
    stream.thread_type = "AUTO"
    yield from container.decode(stream)
