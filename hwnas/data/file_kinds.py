"""The kinds of files that Pillow cannot open, by their first bytes, and what to do with each."""

from __future__ import annotations

HEAD = 512  # bytes that are looked at


class WrongKind(OSError):
    """An error: the file is no image of a format that is read. `kind` says what it is, `step` what to do with it."""

    def __init__(self, kind: str, step: str) -> None:
        super().__init__(f"it is {kind}")
        self.kind, self.step = kind, step


_UNPACK, _FRAMES, _CONVERT = "Unpack it", "Extract its frames", "Convert it"
_HEIC, _AVIF = "Convert it, or pip install pillow-heif", "Convert it, or update Pillow"
_AGAIN = "Fetch it again"
_MARKS = (  # place, bytes there, kind, next step
    (0, b"version https://git-lfs", "a Git LFS pointer", "Give git lfs pull"),
    (0, b"\x1f\x8b", "gzip", _UNPACK), (0, b"PK\x03\x04", "a zip archive", _UNPACK),
    (0, b"7z\xbc\xaf", "a 7z archive", _UNPACK), (0, b"Rar!", "a RAR archive", _UNPACK),
    (257, b"ustar", "a tar archive", _UNPACK), (0, b"BZh", "bzip2", _UNPACK), (0, b"\xfd7zXZ", "xz", _UNPACK),
    (0, b"(\xb5/\xfd", "zstd", _UNPACK),
    (0, b"%PDF", "PDF", "Render its pages"), (0, b"%!PS", "PostScript", "Render it"),
    (4, b"ftypavi", "AVIF", _AVIF),
    *((4, b"ftyp" + brand, "HEIC", _HEIC) for brand in (b"hei", b"hev", b"mif1", b"msf1")),
    (4, b"ftyp", "a video (MP4, MOV)", _FRAMES), (4, b"moov", "a video (MOV)", _FRAMES),
    (0, b"\x1aE\xdf\xa3", "a video (Matroska, WebM)", _FRAMES), (8, b"AVI ", "a video (AVI)", _FRAMES),
    (0, b"\0\0\1\xba", "a video (MPEG)", _FRAMES), (0, b"\0\0\1\xb3", "a video (MPEG)", _FRAMES),
    (0, b"\xff\x4f\xff\x51", "JPEG 2000", _CONVERT), (4, b"jP  ", "JPEG 2000", _CONVERT),
    (0, b"\xff\x0a", "JPEG XL", _CONVERT), (4, b"JXL ", "JPEG XL", _CONVERT), (0, b"8BPS", "Photoshop", _CONVERT),
    (128, b"DICM", "DICOM", _CONVERT), (0, b"\x89HDF", "HDF5", _CONVERT), (0, b"SIMPLE  =", "FITS", _CONVERT),
    (0, b"\x93NUMPY", "a numpy array", "Give arrays by dataset=arrays"),
)
_PAGE = (b"<!doctype html", b"<html", b"<head", b"<body", b"<script")


def kind_of_file(head: bytes) -> tuple[str, str]:
    """Return the kind of a file by its first bytes, and the next step; two empty texts if it is unknown."""
    if not head:
        return "empty", _AGAIN
    for place, mark, kind, step in _MARKS:
        if head[place:place + len(mark)] == mark:
            return kind, step
    # Text formats have no mark at a fixed place: look behind a byte order mark and blanks.
    text = head.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if text.startswith((b"<svg", b"<?xml", b"<!--")) and b"<svg" in text:
        return "SVG", "Render it"
    if text.startswith(_PAGE) or (text.startswith(b"<?xml") and b"<html" in text):
        return "an HTML page", "Fetch it again: the address gave a page and no image"
    if not head.strip(b"\0"):
        return "zeros only", _AGAIN
    if not head.translate(None, bytes(range(32, 256)) + b"\t\r\n\f"):  # no control characters
        return "text", _AGAIN
    return "", ""
