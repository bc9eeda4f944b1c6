"""Every nasty image we can think of, made here, through `open_image`."""

import struct
import warnings
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from llava_consensus.errors import ImageError
from llava_consensus.evaluation.media import MAX_PADDED, MAX_PIXELS, open_image, shrink_to_pad

GRADIENT = np.linspace(0, 255, 30 * 20 * 3).astype(np.uint8).reshape(20, 30, 3)


def png(width: int, height: int, rows: bytes = b"") -> bytes:
    """A PNG that claims a size without having the pixels."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def test_every_mode_is_what_llava_would_see(tmp_path: Path) -> None:
    modes = {"png": "RGB P L LA RGBA 1", "jpg": "RGB CMYK YCbCr", "tif": "CMYK LAB", "gif": "P", "webp": "RGBA"}
    for suffix, names in (modes | {"bmp": "RGB", "ppm": "RGB"}).items():
        for mode in names.split():
            path = tmp_path / f"picture-{mode}.{suffix}"
            Image.fromarray(GRADIENT).convert(mode).save(path)
            opened = open_image(path)
            assert opened.mode == "RGB", path.name
            assert np.array_equal(opened, Image.open(path).convert("RGB")), path.name


TURNED = {  # EXIF's orientation -> what is seen of rows, columns and colours
    1: GRADIENT,
    2: GRADIENT[:, ::-1],
    3: GRADIENT[::-1, ::-1],
    4: GRADIENT[::-1],
    5: GRADIENT.transpose(1, 0, 2),
    6: np.rot90(GRADIENT, -1),
    7: GRADIENT[::-1, ::-1].transpose(1, 0, 2),
    8: np.rot90(GRADIENT),
}


@pytest.mark.parametrize("suffix", ["png", "tif"])
def test_exif_turns_only_when_asked(tmp_path: Path, suffix: str) -> None:
    for orientation, seen in TURNED.items():
        exif = Image.Exif()
        exif[0x0112] = orientation
        path = tmp_path / f"turned-{orientation}.{suffix}"
        Image.fromarray(GRADIENT).save(path, exif=exif)
        assert np.array_equal(open_image(path, upright=True), seen), orientation
        if suffix == "png":  # Pillow itself turns a TIFF when it is loaded
            assert np.array_equal(open_image(path), GRADIENT), orientation


@pytest.mark.parametrize("suffix", ["png", "jpg", "gif", "bmp", "tif", "webp"])
def test_truncated(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"cut.{suffix}"
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    Image.fromarray(noise).save(path)
    data = path.read_bytes()
    for part in (0.3, 0.6, 0.9):
        path.write_bytes(data[: int(len(data) * part)])
        with pytest.raises(ImageError, match="cut"):
            open_image(path)


def test_absent_empty_foreign_heic(tmp_path: Path) -> None:
    (tmp_path / "empty.jpg").touch()
    (tmp_path / "a.heic").write_bytes(b"\0\0\0\x18ftypheic\0\0\0\0mif1heic")
    (tmp_path / "script.eps").write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\nshowpage\n")
    told = {"empty.jpg": "empty, or not", "script.eps": "not an image", "absent": "no such image"}
    told["a.heic"] = r"a HEIC image, which is not read\. Convert it to JPEG or PNG"
    for name, words in told.items():
        with pytest.raises(ImageError, match=words):
            open_image(tmp_path / name)


@pytest.mark.parametrize("size", [(60_000, 60_000), (10_000, 10_000), (2, MAX_PIXELS // 2 + 1)])
def test_bombs_are_refused_with_the_limit(tmp_path: Path, size: tuple[int, int]) -> None:
    path = tmp_path / "bomb.png"
    path.write_bytes(png(*size))
    with warnings.catch_warnings(), pytest.raises(ImageError, match=f"bomb.*{MAX_PIXELS:,}"):
        warnings.simplefilter("ignore")  # Pillow's own, of the same thing
        open_image(path)


def test_a_long_picture_is_opened_and_padded_in_bounded_memory(tmp_path: Path) -> None:
    for size in ((1200, 9000), (30_000, 200)):
        Image.new("RGB", size, (250, 240, 230)).save(tmp_path / "long.png")
        opened = open_image(tmp_path / "long.png")
        assert opened.size == size and max(shrink_to_pad(opened).size) == MAX_PADDED
    small = Image.new("RGB", (MAX_PADDED, 8))
    assert shrink_to_pad(small) is small
