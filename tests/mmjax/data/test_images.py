import io
import os
import struct
import zlib
from pathlib import Path

import numpy as np
import PIL.Image
import pytest

from mmjax.data import images
from mmjax.data.sources.conversation import ImageFile
from mmjax.errors import DataError

MAX_PIXELS = 1_000_000


def picture(folder: Path, name: str) -> ImageFile:
    return ImageFile(where="x.jsonl, line 7", root=folder, path=name)


def read(folder: Path, name: str, channels: int = 3) -> np.ndarray:
    return images.read_pixels(picture(folder, name), max_pixels=MAX_PIXELS, channels=channels)


def encoded(image_format: str, **options) -> bytes:
    stream = io.BytesIO()
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)
    PIL.Image.fromarray(noise).save(stream, image_format, **options)
    return stream.getvalue()


def png_header(width: int, height: int) -> bytes:
    def chunk(name: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(b"\0"))


BAD_FILES = {
    "empty": b"",
    "HTML": b"<html>not found</html>",
    "SVG": b'<svg xmlns="http://www.w3.org/2000/svg"/>',
    "EPS": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n",
    "TIFF, a format not read": encoded("TIFF"),
    "cut PNG": encoded("PNG")[:6000],
    "cut JPEG": encoded("JPEG")[:1500],
    "cut WebP": encoded("WEBP", lossless=True)[:4000],
    "header alone": png_header(8, 8),
    "50,000 x 50,000": png_header(50_000, 50_000),
    "just above the limit": png_header(1_000, 1_001),
}


@pytest.mark.parametrize("kind", BAD_FILES)
def test_a_bad_image_is_an_error_that_names_record_and_file(kind, tmp_path):
    (tmp_path / "a.png").write_bytes(BAD_FILES[kind])
    with pytest.raises(DataError, match=r"x\.jsonl, line 7, image 'a\.png'"):
        read(tmp_path, "a.png")
    assert (tmp_path / "a.png").read_bytes() == BAD_FILES[kind] and os.listdir(tmp_path) == ["a.png"]


def test_the_declared_size_is_refused_before_anything_is_decoded(tmp_path):
    (tmp_path / "a.png").write_bytes(BAD_FILES["50,000 x 50,000"])
    with pytest.raises(DataError, match="found 50000 x 50000 pixels; expected at most 1,000,000 pixels"):
        images.read_size(picture(tmp_path, "a.png"), MAX_PIXELS)


def test_nothing_outside_the_media_root_and_no_special_file_is_opened(tmp_path):
    root = tmp_path / "media"
    root.mkdir()
    (tmp_path / "secret.png").write_bytes(encoded("PNG"))
    (root / "link.png").symlink_to(tmp_path / "secret.png")
    (root / "zero.png").symlink_to("/dev/zero")
    (root / "loop.png").symlink_to(root / "loop.png")
    (root / "folder.png").mkdir()
    os.mkfifo(root / "pipe.png")
    urls = ["http://169.254.169.254/a.png", "file:///etc/passwd", "data:image/png;base64,AAAA"]
    paths = [
        "../secret.png",
        str(tmp_path / "secret.png"),
        "a/../../secret.png",
        "",
        "a\0.png",
        "missing.png",
        "x" * 5000,
    ]
    files = ["link.png", "zero.png", "loop.png", "folder.png", "pipe.png"]
    for path in urls + paths + files:
        with pytest.raises(DataError, match="line 7"):
            read(root, path)


def test_a_link_inside_the_media_root_is_followed(tmp_path):
    (tmp_path / "a.png").write_bytes(encoded("PNG"))
    (tmp_path / "b.png").symlink_to(tmp_path / "a.png")
    np.testing.assert_array_equal(read(tmp_path, "b.png"), read(tmp_path, "a.png"))


@pytest.mark.parametrize("image_format", images.FORMATS)
def test_the_documented_formats_are_read(image_format, tmp_path):
    (tmp_path / "a").write_bytes(encoded(image_format))
    assert read(tmp_path, "a").shape == (64, 64, 3) and read(tmp_path, "a", channels=1).shape == (64, 64, 1)


def test_transparency_becomes_white_and_sixteen_bits_keep_the_upper_eight(tmp_path):
    PIL.Image.fromarray(np.array([[[255, 0, 0, 0], [0, 0, 9, 255]]], np.uint8)).save(tmp_path / "rgba.png")
    assert read(tmp_path, "rgba.png").tolist() == [[[255, 255, 255], [0, 0, 9]]]
    palette = PIL.Image.fromarray(np.array([[0, 1]], np.uint8), "L").convert("P")
    palette.save(tmp_path / "palette.png", transparency=b"\x00\xff")
    assert read(tmp_path, "palette.png").tolist() == [[[255, 255, 255], [1, 1, 1]]]
    PIL.Image.fromarray(np.array([[0, 0x1234, 0xFFFF]], np.uint16)).save(tmp_path / "deep.png")
    assert read(tmp_path, "deep.png")[0, :, 0].tolist() == [0, 0x12, 0xFF]


@pytest.mark.parametrize("patch", [4, 14])
def test_any_shape_fits_the_budget_of_patches_and_small_ones_keep_their_size(patch):
    random = np.random.default_rng(0)
    sizes = [(1, 1), (10_000, 1), (1, 1_000_000), (5000, 3), (200, 203), *random.integers(1, 4000, (200, 2)).tolist()]
    for width, height in sizes:
        for limit in (4, 100, 256):
            fitted = images.fitted_size(width, height, patch_pixels=patch, max_patches=limit)
            rows, columns = images.grid(*fitted, patch_pixels=patch)
            assert rows * columns <= limit and rows % 2 == columns % 2 == 0
            unscaled = images.grid(width, height, patch_pixels=patch)
            if unscaled[0] * unscaled[1] <= limit:
                assert fitted == (width, height)


def test_large_pictures_use_the_budget():
    fitted = images.fitted_size(3000, 2000, patch_pixels=14, max_patches=1024)
    rows, columns = images.grid(*fitted, patch_pixels=14)
    assert 900 <= rows * columns <= 1024
    assert fitted[0] / fitted[1] == pytest.approx(1.5, rel=0.01)


def test_patches_come_in_merge_groups_channel_first_and_padded_with_black():
    pixels = np.random.default_rng(0).integers(0, 256, (7, 12, 3), np.uint8)
    patches = images.to_patches(pixels, 2)
    places = images.patch_positions(*images.grid(12, 7, patch_pixels=2))
    assert places[:8].tolist() == [
        [0, 0, 0],
        [0, 0, 1],
        [0, 1, 0],
        [0, 1, 1],
        [0, 0, 2],
        [0, 0, 3],
        [0, 1, 2],
        [0, 1, 3],
    ]
    padded = np.zeros((8, 12, 3))
    padded[:7] = pixels
    assert patches.shape == (24, 12) and len({tuple(place) for place in places}) == 24
    for patch, (_, row, column) in zip(patches, places, strict=True):
        cell = padded[2 * row : 2 * row + 2, 2 * column : 2 * column + 2]
        np.testing.assert_allclose(patch, ((cell / 255 - 0.5) / 0.5).transpose(2, 0, 1).ravel(), atol=1e-6)
