"""Every nasty image we can think of, made here, through `open_image`."""

import struct
import warnings
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from llava_consensus.errors import ImageError
from llava_consensus.evaluation.media import MAX_PADDED, MAX_PIXELS, open_image, shrink_to_pad

GRADIENT = np.linspace(0, 255, 30 * 20 * 3).astype(np.uint8).reshape(20, 30, 3)


def picture(mode: str = "RGB") -> Image.Image:
    return Image.fromarray(GRADIENT).convert(mode)


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
            picture(mode).save(path)
            opened = open_image(path)
            assert opened.mode == "RGB", path.name
            assert np.array_equal(opened, Image.open(path).convert("RGB")), path.name


def test_alpha_is_dropped_not_laid_over_white(tmp_path: Path) -> None:
    Image.new("RGBA", (4, 4), (200, 10, 10, 0)).save(tmp_path / "clear.png")
    assert open_image(tmp_path / "clear.png").getpixel((1, 1)) == (200, 10, 10)


@pytest.mark.parametrize("suffix", ["png", "tif", "pgm"])
def test_sixteen_bits_are_scaled_not_clipped(tmp_path: Path, suffix: str) -> None:
    deep = np.linspace(0, 65535, 64).astype(np.uint16).reshape(8, 8)
    kept = deep.astype(np.int32) if suffix == "pgm" else deep  # older Pillow writes PGM from mode I only
    Image.fromarray(kept).save(tmp_path / f"deep.{suffix}")
    opened = np.asarray(open_image(tmp_path / f"deep.{suffix}"))
    assert np.abs(opened[..., 0] - deep / 257.0).max() <= 1
    assert np.array_equal(opened[..., 0], opened[..., 2])


@pytest.mark.parametrize(("top", "expected"), [(1.0, 255), (255.0, 255), (1e6, 255), (0.0, 0), (128.0, 128)])
def test_float_gray_is_brought_to_eight_bits(tmp_path: Path, top: float, expected: int) -> None:
    values = np.linspace(0, top, 16, dtype=np.float32).reshape(4, 4)
    values[0, 1] = np.nan
    Image.fromarray(values).save(tmp_path / "float.tif")
    assert np.asarray(open_image(tmp_path / "float.tif")).max() == expected


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
        picture().save(path, exif=exif)
        assert np.array_equal(open_image(path, upright=True), seen), orientation
        if suffix == "png":  # Pillow itself turns a TIFF when it is loaded
            assert np.array_equal(open_image(path), GRADIENT), orientation


def test_damaged_exif_is_no_reason_to_refuse(tmp_path: Path) -> None:
    picture().save(tmp_path / "odd.jpg", exif=b"Exif\x00\x00II*\x00\xff\xff\xff\xff")
    assert open_image(tmp_path / "odd.jpg", upright=True).size == (30, 20)


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


def test_absent_empty_foreign_folder(tmp_path: Path) -> None:
    for name, content, words in (
        ("empty.jpg", b"", "0 bytes"),
        ("text.jpg", b"hello, I am no image\n" * 9, "not an image"),
        ("head.png", b"\x89PNG\r\n\x1a\n", "head.png"),
        ("script.eps", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\nshowpage\n", "not an image"),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ImageError, match=words):
            open_image(tmp_path / name)
    with pytest.raises(ImageError, match="no such picture"):
        open_image(tmp_path / "absent.png")
    with pytest.raises(ImageError, match="folder"):
        open_image(tmp_path)
    with pytest.raises(ImageError, match="cannot be read"):
        open_image(tmp_path / ("x" * 5000))


@pytest.mark.parametrize("size", [(60_000, 60_000), (10_000, 10_000), (2, MAX_PIXELS // 2 + 1)])
def test_bombs_are_refused_quietly_and_with_the_limit(tmp_path: Path, size: tuple[int, int]) -> None:
    path = tmp_path / "bomb.png"
    path.write_bytes(png(*size))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(ImageError, match=f"bomb.*{MAX_PIXELS:,}"):
            open_image(path)


def test_a_long_picture_is_opened_and_padded_in_bounded_memory(tmp_path: Path) -> None:
    for size in ((1200, 9000), (30_000, 200)):
        Image.new("RGB", size, (250, 240, 230)).save(tmp_path / "long.png")
        opened = open_image(tmp_path / "long.png")
        assert opened.size == size and max(shrink_to_pad(opened).size) == MAX_PADDED
    small = Image.new("RGB", (MAX_PADDED, 8))
    assert shrink_to_pad(small) is small


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(at=st.integers(8, 400), byte=st.integers(0, 255), suffix=st.sampled_from(["png", "jpg", "gif", "tif", "webp"]))
def test_a_flipped_byte_never_escapes_as_another_error(tmp_path: Path, at: int, byte: int, suffix: str) -> None:
    path = tmp_path / f"flipped.{suffix}"
    picture("RGB").save(path)
    data = bytearray(path.read_bytes())
    data[at % len(data)] = byte
    path.write_bytes(bytes(data))
    try:
        assert open_image(path, upright=True).mode == "RGB"
    except ImageError as error:
        assert str(path) in str(error)
