"""What a person sees is what a network sees: of every kind of pixel, in training, in predict and by the card's code."""

from __future__ import annotations

import io
import struct
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from hwnas.data.dataset import Dataset, DatasetOptions, Preparation
from hwnas.data.decoding import Decoder, decode
from hwnas.data.file_kinds import kind_of_file
from hwnas.data.folder import Entry
from hwnas.data.loading import load_dataset
from hwnas.data.objects import store_objects
from hwnas.errors import DataError

SIDE = 16
RAMP = np.linspace(0, 255, SIDE).round().astype(np.uint8)[None].repeat(SIDE, 0)  # what a person sees of grey kinds
COLOURS = np.stack([RAMP, RAMP.T, np.full_like(RAMP, 60)], -1)
HALF = np.where(np.arange(SIDE) < SIDE // 2, 255, 0)[None].repeat(SIDE, 0).astype(np.uint8)  # opaque on the left
ON_WHITE = np.where(HALF[..., None] > 0, COLOURS, 255).astype(np.uint8)


def png(array: np.ndarray, colour: int, *chunks: tuple[bytes, bytes]) -> bytes:
    """A PNG of 16 bits a channel, which Pillow writes for grey alone."""
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in array)
    header = struct.pack(">IIBBBBB", array.shape[1], array.shape[0], 16, colour, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(*part) for part in (
        (b"IHDR", header), *chunks, (b"IDAT", zlib.compress(rows)), (b"IEND", b"")))


def saved(image: Image.Image, kind: str, **options: Any) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def palette(transparent: bool) -> bytes:
    image = Image.fromarray(COLOURS).quantize(200)
    if not transparent:
        return saved(image, "PNG")
    indices = np.asarray(image).copy()
    indices[HALF == 0] = 255
    made = Image.fromarray(indices, "P")
    made.putpalette(image.getpalette()[:600] + [1, 2, 3] * 56)
    return saved(made, "PNG", transparency=255)


DEEP = RAMP.astype(np.uint16) * 16  # 12 bits in 16
FULL = RAMP.astype(np.uint16) * 257
ALPHA = np.concatenate([COLOURS, HALF[..., None]], -1)
HIDDEN = np.where(HALF[..., None] > 0, COLOURS, 77).astype(np.uint8)  # the colour under transparent pixels
KINDS: dict[str, tuple[bytes, str, np.ndarray, float]] = {  # file, ending, what is seen, tolerance in levels
    "1 bit": (saved(Image.fromarray(RAMP).point(lambda v: 255 * (v > 127), "1"), "PNG"), "png",
              np.where(RAMP > 127, 255, 0), 0),
    "8 bits": (saved(Image.fromarray(RAMP), "PNG"), "png", RAMP, 0),
    "colours": (saved(Image.fromarray(COLOURS), "BMP"), "bmp", COLOURS, 0),
    "12 bits in 16": (saved(Image.fromarray(DEEP), "PNG"), "png", RAMP, 1),
    "12 bits in TIFF": (saved(Image.fromarray(DEEP), "TIFF"), "tif", RAMP, 1),
    "big-endian 16 bits": (saved(Image.frombytes("I;16B", (SIDE, SIDE), DEEP.astype(">u2").tobytes()), "TIFF"), "tif",
                           RAMP, 1),
    "16 bits": (saved(Image.fromarray(FULL), "PNG"), "png", RAMP, 0),
    "16 bits, 0 is white": (saved(Image.fromarray(65535 - FULL), "TIFF", tiffinfo={262: 0}), "tif", RAMP, 0),
    "16 bits, one transparent": (png(FULL, 0, (b"tRNS", struct.pack(">H", 0))), "png",
                                 np.where(RAMP == 0, 255, RAMP), 0),
    "32 bits": (saved(Image.fromarray(FULL.astype(np.int32) * 1000), "TIFF"), "tif", RAMP, 8),
    "32 bits without a sign": (saved(Image.frombytes("I", (SIDE, SIDE), (FULL * np.uint32(65537)).tobytes()), "TIFF"
                                     ).replace(b"\x53\1\3\0\1\0\0\0\2", b"\x53\1\3\0\1\0\0\0\1"), "tif", RAMP, 1),
    "negative": (saved(Image.fromarray((RAMP.astype(np.int32) - 128) * 8), "TIFF"), "tif", RAMP, 1),
    "fractions": (saved(Image.fromarray((RAMP / 255).astype(np.float32)), "TIFF"), "tif", RAMP, 1),
    "fractions around 0": (saved(Image.fromarray((RAMP / 127.5 - 1).astype(np.float32)), "TIFF"), "tif", RAMP, 1),
    "fractions to 2": (saved(Image.fromarray((RAMP / 128).astype(np.float32)), "TIFF"), "tif", RAMP, 1),
    "fractions to 255": (saved(Image.fromarray(RAMP.astype(np.float32)), "TIFF"), "tif", RAMP, 0),
    "not a number": (saved(Image.fromarray(np.where(RAMP == 0, np.nan, RAMP / 255).astype(np.float32)), "TIFF"), "tif",
                     RAMP, 1),
    "infinite": (saved(Image.fromarray(np.where(RAMP == 255, np.inf, RAMP / 255).astype(np.float32)), "TIFF"), "tif",
                 RAMP, 1),
    "no value": (saved(Image.fromarray(np.where(RAMP == 0, -3.4e38, RAMP).astype(np.float32)), "TIFF"), "tif", RAMP, 0),
    "16 bits a colour": (png(COLOURS.astype(np.uint16) * 257, 2), "png", COLOURS, 0),
    "palette": (palette(transparent=False), "png", COLOURS, 40),
    "transparent palette": (palette(transparent=True), "png", ON_WHITE, 40),
    "alpha": (saved(Image.fromarray(ALPHA), "PNG"), "png", ON_WHITE, 0),
    "alpha over another colour": (saved(Image.fromarray(np.concatenate([HIDDEN, HALF[..., None]], -1)), "PNG"), "png",
                                  ON_WHITE, 0),
    "alpha of 16 bits": (png(ALPHA.astype(np.uint16) * 257, 6), "png", ON_WHITE, 0),
    "alpha in WebP": (saved(Image.fromarray(ALPHA), "WEBP", lossless=True), "webp", ON_WHITE, 0),
    "grey and alpha": (saved(Image.merge("LA", [Image.fromarray(RAMP), Image.fromarray(HALF)]), "PNG"), "png",
                       np.where(HALF > 0, RAMP, 255), 0),
    "one colour is transparent": (saved(Image.fromarray(COLOURS), "PNG", transparency=(0, 0, 60)), "png",
                                  np.where((COLOURS == (0, 0, 60)).all(-1, keepdims=True), 255, COLOURS), 0),
    "CMYK": (saved(Image.fromarray(COLOURS).convert("CMYK"), "TIFF"), "tif", COLOURS, 1),
    "CMYK in JPEG": (saved(Image.fromarray(COLOURS).convert("CMYK"), "JPEG", quality=100), "jpg", COLOURS, 8),
    "YCbCr": (saved(Image.fromarray(COLOURS).convert("YCbCr"), "TIFF"), "tif", COLOURS, 4),
    "JPEG": (saved(Image.fromarray(COLOURS), "JPEG", quality=100, subsampling=0), "jpg", COLOURS, 8),
    "LAB": (saved(Image.new("LAB", (SIDE, SIDE), (255, 128, 128)), "TIFF"), "tif", np.full((SIDE, SIDE, 3), 255), 2),
    "several frames": (saved(Image.fromarray(COLOURS), "WEBP", lossless=True, save_all=True,
                             append_images=[Image.new("RGB", (SIDE, SIDE))]), "webp", COLOURS, 0),
}


def folder_of(root: Path, content: bytes, ending: str) -> Path:
    """Two classes of six files; bytes behind an image's end make each file another."""
    for name in ("a", "b"):
        (root / name).mkdir(parents=True)
        for number in range(6):
            (root / name / f"{number}.{ending}").write_bytes(content + f"{name}{number}".encode())
    return root


def load(root: Path, **options: Any) -> Dataset:
    return load_dataset({"name": "imagefolder", **options, "root": str(root)}, SIDE, 0)


def difference(pixels: np.ndarray, seen: np.ndarray) -> float:
    """Of pixels [c, h, w] in levels, at most."""
    wanted = seen[None] if seen.ndim == 2 else np.moveaxis(seen, -1, 0)
    return float(np.abs(pixels.astype(float) - wanted).max())


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_person_sees_is_what_the_network_sees(kind: str, tmp_path: Path) -> None:
    content, ending, seen, tolerance = KINDS[kind]
    data = load(folder_of(tmp_path / "data", content, ending))
    assert data.channels in (1, 3)
    assert difference(data.train.images[0], seen) <= tolerance

    # Predict and the card's code get what a model file keeps of the preparation, and nothing else.
    assert data.preparation is not None
    path, kept = tmp_path / "data" / "a" / f"0.{ending}", Preparation.of_facts(data.preparation.facts())
    with Image.open(path) as image:
        np.testing.assert_array_equal(decode(image, SIDE, kept.channels, kept.levels, kept.upright),
                                      data.train.images[0])
    scope: dict[str, Any] = {}
    exec(data.preparation.code(), scope)
    np.testing.assert_array_equal(scope["prepared"](path), data.train.images[0])


def test_the_range_of_the_whole_data_set_is_the_scale_of_each_image(tmp_path: Path) -> None:
    dark = saved(Image.fromarray(np.full((SIDE, SIDE), 100, np.uint16)), "PNG")
    root = folder_of(tmp_path, dark, "png")
    plain = load(root)
    assert plain.train.images.max() == 100  # 0 to 255
    (root / "a" / "7.png").write_bytes(saved(Image.fromarray(DEEP), "PNG"))
    data = load(root)
    assert sorted({int(image.max()) for part in (data.train, data.validation, data.test) for image in part.images}) == [
        100 // 16, 255]
    assert data.fingerprint != plain.fingerprint
    assert "values from 0 to 4,095, scaled by 1/16" in "\n".join(data.describe())
    assert load(root, levels=[0, 200]).train.images.max() == 255


def test_a_broken_pixel_that_makes_all_others_dark_is_a_remark(tmp_path: Path) -> None:
    pixels = np.linspace(0, 3000, 4096).astype(np.uint16).reshape(64, 64)
    root = folder_of(tmp_path, saved(Image.fromarray(pixels), "PNG"), "png")
    pixels[0, 0] = 65535
    (root / "a" / "hot.png").write_bytes(saved(Image.fromarray(pixels), "PNG"))
    remark, = load(root).remarks
    assert "dataset.levels=[0,4096]" in remark
    assert not load(root, levels=[0, 4096]).remarks


def test_a_mark_of_missing_values_that_makes_all_others_bright_is_a_remark(tmp_path: Path) -> None:
    marked = saved(Image.fromarray(np.where(RAMP == 0, -9999, RAMP.astype(np.int32) * 8)), "TIFF")
    root = folder_of(tmp_path / "whole", marked, "tif")
    remark, = load(root).remarks
    assert "192 pixels of more than 8 bits are near -9,999" in remark
    assert "dataset.levels=[0,2048]" in remark
    assert difference(load(root, levels=[0, 2048]).train.images[0], RAMP) <= 1
    marked = saved(Image.fromarray(np.where(RAMP == 0, -9999, RAMP / 255).astype(np.float32)), "TIFF")
    assert "dataset.levels=[0,1]" in load(folder_of(tmp_path / "fractions", marked, "tif")).remarks[0]


def test_images_without_contrast_are_a_remark(tmp_path: Path) -> None:
    mask = Image.fromarray((RAMP > 127).astype(np.uint8))  # of classes, in place of images
    assert "hardly any contrast" in load(folder_of(tmp_path, saved(mask, "PNG"), "png")).remarks[0]


def test_ranges_that_nobody_can_guess_are_refused(tmp_path: Path) -> None:
    dark = COLOURS.astype(np.uint16) * 16
    with pytest.raises(DataError, match=r"16 bits a colour have no value above .* Convert them"):
        load(folder_of(tmp_path / "colours", png(dark, 2), "png"))
    mixed = folder_of(tmp_path / "mixed", KINDS["fractions"][0], "tif")
    (mixed / "a" / "0.tif").write_bytes(KINDS["12 bits in TIFF"][0])
    with pytest.raises(DataError, match=r"dataset\.levels="):
        load(mixed)


def test_colours_that_nobody_sees_decide_nothing(tmp_path: Path) -> None:
    """Transparent pixels whose hidden colours differ by class."""
    for name, hidden in (("a", 10), ("b", 240)):
        (tmp_path / name).mkdir()
        for number in range(6):
            image = Image.new("RGBA", (SIDE, SIDE), (hidden, hidden, number, 0))
            image.save(tmp_path / name / f"{number}.png")
    data = load(tmp_path)
    assert {int(value) for value in np.unique(data.train.images)} == {255}
    assert "12 of 12 images can be transparent: seen on white" in "\n".join(data.describe())
    assert data.preparation is not None
    assert "seen on white" in data.preparation.code()


@pytest.mark.parametrize("kind", ["12 bits in 16", "16 bits a colour", "16 bits, one transparent", "several frames",
                                  "one colour is transparent", "transparent palette", "CMYK in JPEG"])
def test_a_list_of_files_is_seen_as_their_folder(kind: str, tmp_path: Path) -> None:
    """What the network learns from, and what predict and the card do with another image."""
    folder = load(root := folder_of(tmp_path / "data", *KINDS[kind][:2]))
    files = sorted(root.glob("*/*"))
    for form in (files, [file.read_bytes() for file in files]):
        listed = load(store_objects((form, [file.parent.name for file in files])), name="arrays")
        np.testing.assert_array_equal(listed.train.images, folder.train.images)
        assert listed.preparation == folder.preparation
        assert listed.kinds == folder.kinds


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_a_rotation_is_counted_and_one_option_turns_it_everywhere(kind: str, tmp_path: Path) -> None:
    turned = Image.Exif()
    turned[274] = 6
    root = folder_of(tmp_path, saved(Image.fromarray(RAMP).convert("RGB"), kind, quality=100), kind.lower())
    for number in range(3):
        exif = turned.tobytes()
        (root / "a" / f"{number}.{kind.lower()}").write_bytes(
            saved(Image.fromarray(RAMP).convert("RGB"), kind, quality=100, exif=exif) + str(number).encode())
    stored, upright = load(root), load(root, upright=True)
    assert "3 of 12 images carry a rotation; used as stored" in "\n".join(stored.describe())
    assert "3 of 12 images carry a rotation; turned upright" in "\n".join(upright.describe())
    assert stored.fingerprint != upright.fingerprint
    files = sorted(root.glob("*/*"))
    listed = store_objects((files, [file.parent.name for file in files]))
    assert (load(listed, name="arrays", upright=True).train.images == upright.train.images).all()
    for data, row in ((stored, RAMP), (upright, RAMP.T)):
        assert difference(data.train.images[0], row) <= 8
        assert data.preparation is not None
        assert "carry a rotation" in data.preparation.code()
        scope: dict[str, Any] = {}
        exec(data.preparation.code(), scope)
        np.testing.assert_array_equal(scope["prepared"](root / "a" / f"0.{kind.lower()}"), data.train.images[0])
        assert Preparation.of_facts(data.preparation.facts()) == replace(data.preparation, remarks=())


WRONG = {
    "empty": b"", "zeros only": bytes(600), "a Git LFS pointer": b"version https://git-lfs.github.com/spec/v1\n",
    "an HTML page": b"\n<!DOCTYPE html><html><body>404</body></html>", "gzip": b"\x1f\x8b\x08\0\0\0\0\0\0\0",
    "PostScript": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n",  # Pillow runs another program
    "a zip archive": b"PK\x03\x04rest", "PDF": b"%PDF-1.7\n%\xe2", "SVG": b"<?xml version='1.0'?>\n<svg width='9'/>",
    "HEIC": b"\0\0\0\x18ftypheic\0\0\0\0", "a video (MP4, MOV)": b"\0\0\0\x18ftypisom\0\0\0\0",
    "a video (AVI)": b"RIFF\0\0\0\0AVI LIST", "JPEG XL": b"\xff\x0a\0\1\2", "DICOM": bytes(128) + b"DICM\2\0",
    "text": b'{"error": "not here"}', "a numpy array": b"\x93NUMPY\1\0",
    "a TIFF of signed bytes": saved(Image.fromarray(RAMP), "TIFF", tiffinfo={339: 2}),
    "a TIFF of 16 bits a colour, each colour by itself": saved(Image.fromarray(COLOURS), "TIFF", tiffinfo={
        284: 2}).replace(b"\x08\0" * 3, b"\x10\0" * 3, 1)}


@pytest.mark.parametrize("kind", WRONG)
def test_a_file_of_another_kind_is_called_what_it_is(kind: str, tmp_path: Path) -> None:
    root = folder_of(tmp_path, KINDS["JPEG"][0], "jpg")
    for number in range(4):
        (root / "b" / f"{number}.jpg").write_bytes(WRONG[kind])
    with pytest.raises(DataError) as refused:
        load(root)
    said = str(refused.value)
    assert f"it is {kind}, and so are 3 more" in said
    assert "dataset.skip_unreadable=true" in said
    (root / "b" / "9.jpg").write_bytes(KINDS["JPEG"][0] + b"9")
    (root / "b" / "10.jpg").write_bytes(KINDS["JPEG"][0] + b"10")
    assert load(root, skip_unreadable=True).left_out == {kind: 4}


@pytest.mark.parametrize("content", [saved(Image.new("RGB", (64, 64)), "AVIF")[:99], b"II*\0torn", b"\1\2\3"])
def test_a_file_that_cannot_be_told_is_torn_or_of_another_kind(content: bytes, tmp_path: Path) -> None:
    root = folder_of(tmp_path, KINDS["JPEG"][0], "jpg")
    (root / "b" / "0.jpg").write_bytes(content)
    with pytest.raises(DataError, match=r"0\.jpg: unreadable image \(torn, or of a kind .* Convert or remove it"):
        load(root)


@pytest.mark.parametrize("kind", ["JPEG", "8 bits", "12 bits in TIFF", "alpha in WebP", "colours"])
def test_an_image_is_no_other_kind(kind: str) -> None:
    assert kind_of_file(KINDS[kind][0][:512]) == ("", "")


def test_an_exif_entry_that_cannot_be_read_turns_nothing(tmp_path: Path) -> None:
    broken = saved(Image.fromarray(COLOURS), "JPEG", quality=100, exif=b"Exif\0\0II*\0garbage, no directory")
    data = load(folder_of(tmp_path, broken, "jpg"))
    assert "rotation" not in "".join(data.describe())


def test_a_network_that_learnt_from_8_bits_refuses_what_would_be_nearly_black(tmp_path: Path) -> None:
    for name, array in (("dark", DEEP), ("bright", FULL)):
        Image.fromarray(array).save(tmp_path / f"{name}.png")
    sources = [Entry(str(tmp_path / f"{name}.png")) for name in ("bright", "dark")]
    decoder = Decoder({"images": sources}, 1, DatasetOptions("images", levels=(0, 65536)), refuses_dark=True)
    (images, _), = decoder([("images", np.array([0]))], SIDE, None)
    assert difference(images[0, 0], RAMP) <= 1
    with pytest.raises(DataError, match=r"dark\.png: its values end at 4,080, .* 8 bits"):
        decoder([("images", np.array([1]))], SIDE, None)
