"""More than sixty inputs a crawl really holds, each with what must become of it: a sample, or a listed reason."""

from __future__ import annotations

import io
import struct
import tarfile
import zlib
from dataclasses import dataclass

import numpy as np
from PIL import Image

SIZE = 32


@dataclass(frozen=True)
class Input:
    """`reason` is None for an input that must be accepted."""

    name: str
    content: bytes
    reason: str | None


def picture(seed: int, width: int = 48, height: int = 40, channels: int = 3) -> np.ndarray:
    """A smooth random picture, so that lossy formats keep it recognisable."""
    coarse = np.random.default_rng(seed).integers(0, 256, (5, 6, channels), dtype=np.uint8)
    image = Image.fromarray(coarse[..., 0] if channels == 1 else coarse).resize(
        (width, height), Image.Resampling.BICUBIC
    )
    return np.asarray(image)


def encoded(array: np.ndarray | Image.Image, kind: str, **options: object) -> bytes:
    image = array if isinstance(array, Image.Image) else Image.fromarray(array)
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def png_chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width: int, height: int, bits: int, color: int, rows: bytes) -> bytes:
    """A PNG written by hand, to say what Pillow would not."""
    header = struct.pack(">IIBBBBB", width, height, bits, color, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + png_chunk(b"IHDR", header)
        + png_chunk(b"IDAT", zlib.compress(rows))
        + png_chunk(b"IEND", b"")
    )


def exif(orientation: int) -> bytes:
    tags = Image.Exif()
    tags[0x0112] = orientation
    return tags.tobytes()


def flipped(content: bytes, place: int) -> bytes:
    return content[:place] + bytes([content[place] ^ 0xFF]) + content[place + 1 :]


def corpus() -> list[Input]:
    jpeg, good_png = encoded(picture(0), "JPEG", quality=90), encoded(picture(1), "PNG")
    webp, gif = encoded(picture(2), "WEBP", quality=80), encoded(picture(3), "GIF")
    bmp, tiff = encoded(picture(4), "BMP"), encoded(picture(5), "TIFF")
    frames = [Image.fromarray(picture(10 + i)) for i in range(3)]
    sixteen = (picture(20, channels=1).astype(np.uint16) * 257 + 3).astype(np.uint16)
    cmyk = Image.fromarray(picture(21)).convert("CMYK")
    alpha = np.dstack([picture(22), np.full((40, 48), 128, np.uint8)])
    accepted = {
        "plain.jpg": jpeg,
        "plain.png": good_png,
        "plain.webp": webp,
        "plain.gif": gif,
        "plain.bmp": bmp,
        "plain.tif": tiff,
        "wrongly_named.png": encoded(picture(6), "JPEG"),
        "wrongly_named.jpg": encoded(picture(7), "PNG"),
        "no_ending": encoded(picture(8), "PNG"),
        "SHOUTING.JPG": encoded(picture(9), "JPEG"),
        "name with spaces.jpg": encoded(picture(30), "JPEG"),
        "ünïcode.png": encoded(picture(31), "PNG"),
        "animated.gif": encoded(frames[0], "GIF", save_all=True, append_images=frames[1:]),
        "animated.webp": encoded(frames[0], "WEBP", save_all=True, append_images=frames[1:]),
        "animated.png": encoded(frames[0], "PNG", save_all=True, append_images=frames[1:]),
        "pages.tif": encoded(frames[0], "TIFF", save_all=True, append_images=frames[1:]),
        "cmyk.jpg": encoded(cmyk, "JPEG"),
        "cmyk.tif": encoded(cmyk, "TIFF"),
        "sixteen_bit_grey.png": encoded(sixteen, "PNG"),
        "sixteen_bit_grey.tif": encoded(sixteen, "TIFF"),
        "sixteen_bit_color.png": png(48, 40, 16, 2, b"".join(b"\0" + bytes(48 * 6) for _ in range(40))),
        "grey.jpg": encoded(picture(32, channels=1), "JPEG"),
        "grey_alpha.png": encoded(Image.fromarray(picture(33, channels=1)).convert("LA"), "PNG"),
        "alpha.png": encoded(alpha, "PNG"),
        "alpha.webp": encoded(alpha, "WEBP"),
        "palette.png": encoded(Image.fromarray(picture(34)).quantize(16), "PNG"),
        "palette_transparent.png": encoded(Image.fromarray(picture(35)).quantize(16), "PNG", transparency=3),
        "one_bit.png": encoded(Image.fromarray(picture(36, channels=1)).convert("1"), "PNG"),
        "one_bit.tif": encoded(Image.fromarray(picture(36, channels=1)).convert("1"), "TIFF"),
        "two_bit.png": png(48, 40, 2, 0, b"".join(b"\0" + bytes(range(12)) for _ in range(40))),
        "interlaced.gif": encoded(Image.fromarray(picture(37)), "GIF", interlace=1),
        "progressive.jpg": encoded(picture(38), "JPEG", progressive=True),
        "ycbcr.tif": encoded(Image.fromarray(picture(39)).convert("YCbCr"), "TIFF"),
        "pixmap.ppm": encoded(picture(40), "PPM"),
        "rotated_90.jpg": encoded(picture(41), "JPEG", exif=exif(6)),
        "rotated_180.jpg": encoded(picture(42), "JPEG", exif=exif(3)),
        "mirrored.jpg": encoded(picture(43), "JPEG", exif=exif(2)),
        "bad_exif.jpg": encoded(picture(44), "JPEG", exif=b"Exif\0\0" + b"\xff" * 20),
        "impossible_orientation.jpg": encoded(picture(45), "JPEG", exif=exif(77)),
        "bytes_after_the_end.jpg": encoded(picture(46), "JPEG") + b"\0" * 1000,
        "bytes_after_the_end.png": encoded(picture(47), "PNG") + b"<?php",
        "very_wide.png": encoded(picture(48, width=900, height=20), "PNG"),
        "very_tall.jpg": encoded(picture(49, width=17, height=700), "JPEG"),
        "large.jpg": encoded(picture(50, width=1500, height=1100), "JPEG"),
        "just_large_enough.png": encoded(picture(51, width=16, height=16), "PNG"),
        "unknown_chunk.png": good_png[:33] + png_chunk(b"juNK", b"x" * 50) + good_png[33:],
        "comment.jpg": encoded(picture(52), "JPEG", comment=b"\xff\xfe\x00 not text"),
    }
    rejected = {
        "empty.jpg": (b"", "empty file"),
        "one_byte.jpg": (b"\xff", "not an image"),
        "text.jpg": (b"this is not a picture\n", "not an image"),
        "page.html": (b"<!doctype html><html><body>404</body></html>", "not an image"),
        "vector.svg": (b"<svg xmlns='x'><rect width='9' height='9'/></svg>", "not an image"),
        "script.eps": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n", "not an image"),
        "document.pdf": (b"%PDF-1.4\n1 0 obj<<>>endobj\ntrailer<<>>\n%%EOF", "not an image"),
        "archive.png": (b"PK\x03\x04" + b"\0" * 60, "not an image"),
        "zeros.png": (bytes(4096), "not an image"),
        "noise.jpg": (np.random.default_rng(5).bytes(4096), "not an image"),
        "only_magic.jpg": (b"\xff\xd8\xff\xe0", "not an image"),
        "only_magic.png": (b"\x89PNG\r\n\x1a\n", "not an image"),
        "truncated.jpg": (jpeg[: len(jpeg) // 2], "corrupt"),
        "truncated.png": (good_png[: len(good_png) // 2], "corrupt"),
        "truncated.webp": (webp[: len(webp) // 2], "corrupt"),
        "truncated.bmp": (bmp[: len(bmp) // 2], "corrupt"),
        "truncated.tif": (tiff[: len(tiff) // 2], "corrupt"),
        "wrong_checksum.png": (flipped(good_png, 60), "corrupt"),
        "no_pixels.png": (png(48, 40, 8, 2, b""), "corrupt"),
        "zero_wide.png": (png(0, 40, 8, 2, b""), "not an image"),
        "impossible_depth.png": (png(48, 40, 7, 2, b"\0" * 6000), "not an image"),
        "bomb.png": (png(60_000, 60_000, 8, 0, bytes(70_000)), "too many pixels"),
        "larger_than_the_sea.png": (png(20_000, 20_000, 1, 0, bytes(3_000)), "too many pixels"),
        "tiny.png": (encoded(picture(60, width=4, height=4), "PNG"), "too small"),
        "one_pixel.gif": (encoded(picture(61, width=1, height=1), "GIF"), "too small"),
        "thin.png": (encoded(picture(62, width=400, height=15), "PNG"), "too small"),
        "float.tif": (encoded(Image.fromarray(np.full((40, 48), 0.5, np.float32)), "TIFF"), "unknown value range"),
        "thirty_two_bit.tif": (
            encoded(Image.fromarray(np.full((40, 48), 2**20, np.int32)), "TIFF"),
            "unknown value range",
        ),
    }
    inputs = [Input(name, content, None) for name, content in accepted.items()]
    return inputs + [Input(name, content, reason) for name, (content, reason) in rejected.items()]


def tar(contents: dict[str, bytes], form: int = tarfile.USTAR_FORMAT) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=form) as file:
        for name, content in contents.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            file.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def headers(content: bytes) -> list[int]:
    """Where the members of a sound tar begin."""
    with tarfile.open(fileobj=io.BytesIO(content)) as file:
        return [member.offset for member in file]
