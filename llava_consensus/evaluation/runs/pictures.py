"""Pictures and videos of a run as RGB, opened safely, or one line that says why not; and their encodings, kept for
the next questions about them (`EncodingCache`).

Colours are those of LLaVA's own `Image.open(path).convert("RGB")`, so answers stay comparable: the alpha channel is
dropped (not laid over white), palettes and CMYK go through Pillow's plain conversion, the first frame of an animation
counts, and a rotation written in EXIF is not applied unless `upright` (which `ask` sets, benchmarks do not).
The one difference: 16-bit and float grayscale is scaled to 0..255, where LLaVA clips it to white.

Refused with an ImageError: missing, empty, truncated and foreign files, and pictures so large that opening or padding
them to a square would exhaust memory. Only raster formats are decoded: nothing here ever starts a program (Pillow runs
Ghostscript for EPS).

Of a video `count` frames are shown, at equal steps from the first to the last as Video-LLaVA samples them, so a video
of one frame shows it `count` times. Nothing is flipped (Video-LLaVA flips half of the videos at random even when it
evaluates). Any container and codec that PyAV reads (`pip install 'llava-consensus[video]'`); an animated GIF is read by
Pillow. Files are decoded once, and only the wanted frames are kept in memory.

    from llava_consensus.evaluation.runs.pictures import open_image, read_clip
    image, clip = open_image("photo.jpg", upright=True), read_clip("clip.mp4", 8)
"""

import io
import threading
import warnings
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from llava_consensus.errors import ConsensusError, ImageError, missing_extra
from llava_consensus.evaluation.models import Encoded, Host
from llava_consensus.evaluation.models.base import Clip
from llava_consensus.evaluation.runs.configuration import RunPlan
from llava_consensus.evaluation.runs.execution import raise_if_device_failed

MAX_PIXELS = 89_478_485  # from here on Pillow itself suspects a decompression bomb
MAX_SIDE = 8_192  # LLaVA pads to a square of floats, so a long thin picture costs side x side: at most 0.8 GB
_FORMATS = "JPEG MPO PNG GIF BMP DIB WEBP AVIF TIFF JPEG2000 PPM TGA ICO PCX QOI DDS SGI PSD"
FORMATS = tuple(_FORMATS.split())
DEEP = ("I", "F")  # modes that start so hold more than 8 bits a pixel
# demuxers of files that name no other file
VIDEO_FORMATS = "mov,matroska,webm,avi,mpegts,mpeg,mpegvideo,flv,asf,ogg,gif,h264,hevc,rm,mjpeg,ivf,dv,mxf,wav,mp3"
INTACT = 0.9  # of the frames that the head of a file promises; with fewer it counts as cut off
_HEADERS = threading.Lock()  # the filter of warnings is one per process


def open_image(path: str | Path, upright: bool = False, content: bytes | None = None) -> Image.Image:
    """The picture as RGB; `upright` turns it as its EXIF says. ImageError if it cannot be read.

    `content` is the picture itself where it is no file of its own; `path` then only names it.
    """
    path = Path(path)
    if content is None:
        check_file(path)
    elif not content:
        raise ImageError(f"{path}: empty (0 bytes)")
    with open_header(path, content) as picture:
        check_size(path, picture.size)
        try:
            picture.load()
            shown = _turned(picture) if upright else picture
            return shown.convert("RGB") if not shown.mode.startswith(DEEP) else _from_deep(shown)
        except Exception as error:  # decoders fail in many ways, and each means that the file is damaged
            raise ImageError(f"{path}: damaged or cut off ({reason(error)})") from error


def check_file(path: Path, kind: str = "picture") -> None:
    """Raises an ImageError unless there is a regular file with something in it."""
    try:
        if path.is_dir():
            raise ImageError(f"{path}: is a folder, not a {kind}")
        if not path.exists():
            raise ImageError(f"{path}: no such {kind}")
        if not path.is_file():
            raise ImageError(f"{path}: not a regular file")
        if path.stat().st_size == 0:
            raise ImageError(f"{path}: empty file (0 bytes)")
    except OSError as error:
        raise ImageError(f"{path}: cannot be read ({error.strerror})") from error


def open_header(path: Path, content: bytes | None = None) -> Image.Image:
    """Reads no pixels yet. Pillow's own warning about large pictures is left to `check_size`, which refuses them."""
    Image.init()
    try:
        with _HEADERS, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return Image.open(
                path if content is None else io.BytesIO(content),
                formats=[name for name in FORMATS if name in Image.OPEN],
            )
    except UnidentifiedImageError as error:
        raise ImageError(f"{path}: not a picture in a known format, or its head is damaged") from error
    except Image.DecompressionBombError as error:
        raise ImageError(_too_large(path, f"over {2 * MAX_PIXELS:,} pixels")) from error
    except Exception as error:  # as above
        raise ImageError(f"{path}: cannot be read ({reason(error)})") from error


def check_size(path: Path, size: tuple[int, int]) -> None:
    """Raises an ImageError for a size in pixels that could exhaust memory, or for none at all."""
    width, height = size
    if width * height > MAX_PIXELS or max(size) > MAX_SIDE:
        raise ImageError(_too_large(path, f"{width:,} x {height:,} pixels"))
    if min(size) < 1:
        raise ImageError(f"{path}: a picture without pixels ({width} x {height})")


def _too_large(path: Path, what: str) -> str:
    limits = f"at most {MAX_PIXELS:,} pixels and {MAX_SIDE:,} on a side"
    return f"{path}: {what}, refused as a possible decompression bomb (limit: {limits}). Scale it down first"


def _from_deep(picture: Image.Image) -> Image.Image:
    """16-bit, 32-bit or float gray to 8 bits: by the range of its type, or by its brightest value if unclear."""
    values = np.nan_to_num(np.asarray(picture, dtype=np.float32), posinf=0, neginf=0).clip(min=0)
    top = float(values.max())
    if picture.mode == "F" and top <= 1:
        full = 1.0
    elif top <= 255 and not picture.mode.startswith("I;16"):
        full = 255.0
    else:
        full = max(65535.0, top) if picture.mode != "F" else top
    return Image.fromarray((values * (255 / full)).round().astype(np.uint8)).convert("RGB")


def _turned(picture: Image.Image) -> Image.Image:
    """A loaded picture as its EXIF wants it seen; a damaged EXIF turns nothing."""
    try:
        return ImageOps.exif_transpose(picture)
    except Exception:  # the pixels are fine, and that is what was asked for
        return picture


def reason(error: Exception) -> str:
    """What an exception says, or its name where it says nothing."""
    return str(error) or type(error).__name__


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
    return av.open(str(path.absolute()), options={"format_whitelist": VIDEO_FORMATS, "protocol_whitelist": "file"})


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


AT_ONCE = 1 << 26  # pixels that are opened and not yet encoded: 0.2 GB
CAPACITY = 256  # pictures that are kept encoded at once; each frame of a video counts


class ModelFailed(ImageError):
    """A picture that can be read, at which the model fails."""


Reader = Callable[[Path], list[Image.Image | Clip]]


def reader(plan: RunPlan) -> Reader:
    """Opens a file of a run: the one picture in it, or the frames of a video that are shown, apart or as one clip.

    The function raises an ImageError for a file that cannot be read.
    """
    frames, content = plan.benchmark.frames, plan.content
    if plan.clips:
        return lambda path: [read_clip(path, frames)]
    if frames:
        return lambda path: list(read_frames(path, frames))
    return lambda path: [open_image(path, content=content(path) if content else None)]


class EncodingCache:
    """Encodings by file: the vision tower runs once per picture, and an encoding is forgotten after its last question.

    Args:
        host: encodes.
        asked: files of each question that will be asked, in order.
        read: opens a file, see `reader`.
        capacity: files that are kept at most.
    """

    def __init__(self, host: Host, asked: Iterable[Sequence[Path]], read: Reader, capacity: int = CAPACITY) -> None:
        self._host, self._read, self._capacity = host, read, max(1, capacity)
        self._ahead = Counter(path for paths in asked for path in paths)  # questions still to come about each file
        self._held: OrderedDict[Path, list[Encoded] | ImageError] = OrderedDict()

    def fetch(self, asked: Sequence[Sequence[Path]]) -> list[list[Encoded] | ImageError]:
        """For each question the encodings of its files, or the error of the first that is unreadable."""
        fresh: dict[Path, list[Image.Image | Clip]] = {}
        needed = list(dict.fromkeys(path for paths in asked for path in paths))
        for path in needed:
            if path not in self._held:
                try:
                    fresh[path] = self._read(path)
                except ImageError as error:
                    self._held[path] = error
                if sum(_pixels(picture) for pictures in fresh.values() for picture in pictures) > AT_ONCE:
                    self._held.update(self._encode(fresh))
                    fresh = {}
        self._held.update(self._encode(fresh))
        found: list[list[Encoded] | ImageError] = []
        for paths in asked:
            held = [self._held[path] for path in paths]
            unreadable = next((one for one in held if isinstance(one, ImageError)), None)
            found.append(unreadable or [one for own in held if not isinstance(own, ImageError) for one in own])
        self._ahead.subtract(path for paths in asked for path in paths)
        for path in needed:
            self._held.move_to_end(path)
            if self._ahead[path] <= 0:
                del self._held[path]
        while len(self._held) > self._capacity:
            self._held.popitem(last=False)
        return found

    def _encode(self, fresh: dict[Path, list[Image.Image | Clip]]) -> dict[Path, list[Encoded] | ImageError]:
        """Encodings by file, all in one batch; file by file where that fails, so that one does not spoil the others."""
        if not fresh:
            return {}
        try:
            encoded = iter(self._host.encode([image for images in fresh.values() for image in images]))
            return {path: [next(encoded) for _ in images] for path, images in fresh.items()}
        except ConsensusError:
            raise
        except Exception as error:  # anything a model can raise about a picture
            raise_if_device_failed(error, str(next(iter(fresh))))
            if len(fresh) == 1:
                path = next(iter(fresh))
                return {path: ModelFailed(f"{path}: the model fails at it ({type(error).__name__}: {reason(error)})")}
        return {path: found for one, images in fresh.items() for path, found in self._encode({one: images}).items()}


def _pixels(picture: Image.Image | Clip) -> int:
    """Of a picture, or of all frames of a clip."""
    frames = picture.frames if isinstance(picture, Clip) else (picture,)
    return sum(frame.width * frame.height for frame in frames)
