"""From what a source holds to square uint8 images; whatever cannot be one is a `BadImage` with a reason."""

from __future__ import annotations

import hashlib
import io

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

# What we ask Pillow to read. The rest of its formats are rare, or start other programs (EPS runs Ghostscript).
# Some builds lack some of them.
Image.init()
FORMATS = tuple(
    name for name in ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "AVIF", "PPM", "JPEG2000") if name in Image.OPEN
)
MOST_PIXELS = 100_000_000  # a larger picture is a decompression bomb or a map, and would need gigabytes
SIXTEEN_BIT = ("I;16", "I;16B", "I;16L", "I;16N", "I")
TOO_SMALL = "too small"
TRANSPARENT = ("RGBA", "LA", "PA", "RGBa", "La")


class BadImage(Exception):
    """This image cannot be used. `reason` is one of a few words to count by, `detail` says more."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(reason)
        self.reason = reason
        self.detail = detail


def identity(content: bytes | np.ndarray) -> bytes:
    """sha256 of the encoded bytes; of dtype, shape and raw bytes for an array."""
    if isinstance(content, bytes):
        return hashlib.sha256(content).digest()
    array = np.ascontiguousarray(content)
    header = f"{array.dtype.str} {'x'.join(map(str, array.shape))} ".encode()
    return hashlib.sha256(header + array.tobytes()).digest()


def to_pixels(content: bytes | np.ndarray, size: int, channels: int, smallest: int) -> np.ndarray:
    """The middle square of an image as uint8 [channels, size, size], resized with antialiasing.

    It is encoded bytes, or uint8 [H, W] or [H, W, 3]. One whose shorter side has fewer than `smallest` pixels is
    refused.
    """
    if isinstance(content, bytes):
        image = decode(content, size, smallest)
    else:
        image = Image.fromarray(content)
        check_side(image, smallest)
    image = image.convert("RGB" if channels == 3 else "L")
    side = min(image.size)
    if image.size != (size, size):
        left, top = (image.width - side) / 2, (image.height - side) / 2
        image = image.resize((size, size), Image.Resampling.BICUBIC, box=(left, top, left + side, top + side))
    pixels = np.asarray(image)
    return pixels[None] if channels == 1 else np.ascontiguousarray(pixels.transpose(2, 0, 1))


def check_side(image: Image.Image, smallest: int) -> None:
    if min(image.size) < smallest:
        raise BadImage(TOO_SMALL, f"{image.width}x{image.height}, need {smallest} a side")


def decode(content: bytes, size: int, smallest: int) -> Image.Image:
    """The first frame of an encoded image, upright, with 8 bits per channel and nothing transparent.

    The format is read off the bytes, never off a name. A large JPEG is decoded at a fraction of its size, never
    below twice the size wanted.
    """
    if not content:
        raise BadImage("empty file")
    try:
        with Image.open(io.BytesIO(content), formats=FORMATS) as image:
            if image.width * image.height > MOST_PIXELS:
                raise BadImage("too many pixels", f"{image.width}x{image.height}")
            check_side(image, smallest)  # before draft, which shrinks it
            image.draft(None, (2 * size, 2 * size))
            image.load()
            return upright(eight_bit(image))
    except BadImage:
        raise
    except UnidentifiedImageError as error:
        raise BadImage("not an image") from error
    except Image.DecompressionBombError as error:
        raise BadImage("too many pixels") from error
    except Exception as error:  # decoders raise anything at all on hostile bytes, and none of it may stop the run
        raise BadImage("corrupt", type(error).__name__) from error


def upright(image: Image.Image) -> Image.Image:
    """Turned as its exif says; an exif block that cannot be read turns nothing."""
    try:
        return ImageOps.exif_transpose(image)
    except Exception:  # noqa: BLE001, the picture is fine, only its notes are not
        return image


def eight_bit(image: Image.Image) -> Image.Image:
    """Sixteen bits scaled to eight, transparency laid on white, palettes looked up."""
    if image.mode in SIXTEEN_BIT:
        values = np.asarray(image).astype(np.int64)
        if values.size and (values.min() < 0 or values.max() > 65_535):
            raise BadImage("unknown value range", f"{image.mode} {values.min()} to {values.max()}")
        grey = Image.fromarray(((values * 255 + 32_767) // 65_535).astype(np.uint8))
        grey.info = image.info
        return grey
    if image.mode == "F":
        raise BadImage("unknown value range", "floating-point pixels")
    if image.mode in TRANSPARENT or "transparency" in image.info:
        color = image.convert("RGBA")
        flat = Image.new("RGBA", color.size, (255, 255, 255, 255))
        flat.alpha_composite(color)
        flat.info = image.info
        return flat.convert("RGB")
    return image
