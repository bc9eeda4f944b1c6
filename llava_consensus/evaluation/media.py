"""Images and videos as RGB, opened safely, or one line that says why not.

Colours are those of LLaVA's own `Image.open(path).convert("RGB")`, so answers stay comparable: the alpha channel is
dropped, the first frame of an animation counts, and a rotation written in EXIF is applied only if `upright` (`ask` sets
it, benchmarks do not).

Refused with an ImageError: missing, empty, truncated and foreign files, and images whose decoded size would exhaust
memory. Only raster formats are decoded, so nothing here ever starts a program (Pillow runs Ghostscript for EPS).

`count` frames of a video are used, at equal steps from the first to the last as Video-LLaVA samples them, so a video
of one frame shows it `count` times. Frames are turned as the file's display matrix says. Any container and codec that
PyAV reads (extra `video`).
"""

import io
from contextlib import closing, suppress
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from llava_consensus.errors import ImageError, missing_extra

MAX_PIXELS = 89_478_485  # from here on Pillow itself suspects a decompression bomb
MAX_PADDED = 8_192  # side of a square that an image is padded to: 1 GB in LLaVA's preprocessing
_FORMATS = "JPEG MPO PNG GIF BMP DIB WEBP AVIF TIFF JPEG2000 PPM TGA ICO PCX QOI DDS SGI PSD"
FORMATS = tuple(_FORMATS.split())
HEIC = (b"heic", b"heix", b"heif", b"mif1", b"msf1", b"hevc")  # brands of the container
# demuxers of files that name no other file
VIDEO_FORMATS = "mov,matroska,webm,avi,mpegts,mpeg,mpegvideo,flv,asf,ogg,gif,h264,hevc,rm,mjpeg,ivf,dv,mxf,wav,mp3"
INTACT = 0.9  # of the frames that the head of a file promises; with fewer it counts as cut off


class Clip(NamedTuple):
    frames: tuple[Image.Image, ...]
    places: tuple[int, ...]  # of the frames in the video, ascending
    length: int  # frames of the video
    rate: float | None = None  # frames a second, if the file says it


def open_image(path: str | Path, upright: bool = False, content: bytes | None = None) -> Image.Image:
    """The image as RGB; `upright` turns it as its EXIF says. ImageError if it cannot be read.

    `content` is the image itself if it is not a separate file; `path` then only names it.
    """
    path = Path(path)
    if content is None:
        check_file(path)
    elif not content:
        raise ImageError(f"{path}: empty (0 bytes)")
    with open_header(path, content) as image:
        check_size(path, image.size)
        shown: Image.Image = image
        try:
            image.load()
            with suppress(Exception):  # a damaged EXIF turns nothing, and the pixels are fine
                shown = ImageOps.exif_transpose(image) if upright else image
            return shown.convert("RGB")
        except Exception as error:  # decoders fail in many ways
            raise ImageError(f"{path}: damaged or cut off ({reason(error)})") from error


def check_file(path: Path, kind: str = "image") -> None:
    """Raises an ImageError unless there is a regular file with something in it."""
    try:
        if not path.exists():
            raise ImageError(f"{path}: no such {kind}")
        if not path.is_file() or path.stat().st_size == 0:
            raise ImageError(f"{path}: empty, or not a regular file")
    except OSError as error:
        raise ImageError(f"{path}: cannot be read ({error.strerror})") from error


def open_header(path: Path, content: bytes | None = None) -> Image.Image:
    Image.init()
    try:
        known = [name for name in FORMATS if name in Image.OPEN]
        return Image.open(path if content is None else io.BytesIO(content), formats=known)
    except UnidentifiedImageError as error:
        head = (path.read_bytes() if content is None else content)[4:12]
        if head[:4] == b"ftyp" and head[4:] in HEIC:
            raise ImageError(f"{path}: a HEIC image, which is not read. Convert it to JPEG or PNG") from error
        raise ImageError(f"{path}: not an image in a known format, or its head is damaged") from error
    except Image.DecompressionBombError as error:
        raise ImageError(_too_large(path, f"over {2 * MAX_PIXELS:,} pixels")) from error
    except Exception as error:  # decoders fail in many ways
        raise ImageError(f"{path}: cannot be read ({reason(error)})") from error


def check_size(path: Path, size: tuple[int, int]) -> None:
    """Raises an ImageError for a size in pixels that could exhaust memory, or for none at all."""
    width, height = size
    if width * height > MAX_PIXELS:
        raise ImageError(_too_large(path, f"{width:,} x {height:,} pixels"))
    if min(size) < 1:
        raise ImageError(f"{path}: an image without pixels ({width} x {height})")


def _too_large(path: Path, what: str) -> str:
    limit = f"limit: {MAX_PIXELS:,} pixels"
    return f"{path}: {what}, refused as a possible decompression bomb ({limit}). Scale it down first"


def shrink_to_pad(image: Image.Image) -> Image.Image:
    """The image, scaled down if a square of its longer side would take gigabytes.

    For preprocessing that pads to a square before it resizes to some hundred pixels.
    """
    scale = MAX_PADDED / max(image.size)
    width, height = (max(1, round(side * scale)) for side in image.size)
    return image if scale >= 1 else image.resize((width, height), Image.Resampling.BICUBIC)


def reason(error: Exception) -> str:
    return str(error) or type(error).__name__


def decoder() -> ModuleType:
    try:
        import av
    except ImportError as error:
        raise missing_extra("reading videos needs PyAV (av)", "video") from error
    av.logging.set_level(None)  # errors are raised; the codecs' own messages are noise
    module: ModuleType = av
    return module


def sample_places(length: int, count: int) -> list[int]:
    """Indices of the sampled frames: `count` of `length`, ascending, first and last included."""
    places: list[int] = np.linspace(0, length - 1, count, dtype=int).tolist()
    return places


def read_frames(path: str | Path, count: int) -> list[Image.Image]:
    """`count` frames of a video as RGB images; ImageError names the file that cannot be read."""
    return list(read_clip(path, count).frames)


def read_clip(path: str | Path, count: int) -> Clip:
    """`count` frames of a video, RGB, with their indices; ImageError names the file that cannot be read."""
    path = Path(path)
    check_file(path, "video")
    av = decoder()
    try:
        length, rate = _length(av, path)
        kept, decoded = _pick(av, path, sample_places(length, count))
        if 0 < decoded < length:  # packets without a frame, as old .avi files have them
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
    """Number of coded frames, counted without decoding, and how many a second has, if the file says so. ImageError
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
        stream = container.streams.video[0]
        stream.thread_type = "AUTO"
        for decoded, frame in enumerate(container.decode(stream), start=1):
            if decoded - 1 in wanted:
                kept[decoded - 1] = _shown(frame)
            if decoded > places[-1]:
                break
    return kept, decoded


def _shown(frame: Any) -> Image.Image:
    """A decoded frame as RGB, turned by quarters as its display matrix says."""
    image: Image.Image = frame.to_image().convert("RGB")
    turn = round(frame.rotation) if frame.rotation % 90 == 0 else 0
    return image.rotate(turn, expand=True) if turn else image
