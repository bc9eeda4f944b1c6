"""Open any picture safely, as RGB, or say in one line why not.

Colours are those of LLaVA's own `Image.open(path).convert("RGB")`, so answers stay comparable: the alpha channel is
dropped (not laid over white), palettes and CMYK go through Pillow's plain conversion, the first frame of an animation
counts, and a rotation written in EXIF is not applied unless `upright` (which `ask` sets, benchmarks do not).
The one difference: 16-bit and float grayscale is scaled to 0..255, where LLaVA clips it to white.

Refused with an ImageError: missing, empty, truncated and foreign files, and pictures so large that opening or padding
them to a square would exhaust memory. Only raster formats are decoded: nothing here ever starts a program (Pillow runs
Ghostscript for EPS).

    from llava_consensus.evaluation.runs.pictures import open_image
    image = open_image("photo.jpg", upright=True)
"""

import io
import threading
import warnings
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from llava_consensus.errors import ImageError

MAX_PIXELS = 89_478_485  # from here on Pillow itself suspects a decompression bomb
MAX_SIDE = 8_192  # LLaVA pads to a square of floats, so a long thin picture costs side x side: at most 0.8 GB
_FORMATS = "JPEG MPO PNG GIF BMP DIB WEBP AVIF TIFF JPEG2000 PPM TGA ICO PCX QOI DDS SGI PSD"
FORMATS = tuple(_FORMATS.split())
DEEP = ("I", "F")  # modes that start so hold more than 8 bits a pixel
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
