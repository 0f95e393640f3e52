"""Encodes and decodes images in MDS columns (`pil`, `jpeg`, `png`). PIL is imported at the first image column."""

import importlib
import struct
from collections.abc import Callable
from io import BytesIO
from typing import Any

from loader.base.argument_checks import with_article
from loader.errors import EncodingError, UnmetNeedError


def encode_pil(value: Any) -> bytes:
    """Return the pixels of a PIL image with its size and mode."""
    mode: bytes = value.mode.encode()
    return struct.pack("<III", *value.size, len(mode)) + mode + bytes(value.tobytes())


def image_encoder(kind: str) -> Callable[[Any], bytes]:
    """Return the function that encodes a PIL image as jpeg or png."""

    def encode(value: Any) -> bytes:
        if not hasattr(value, "save"):
            raise EncodingError(f"{with_article(value)} is neither a PIL image nor an encoded one")
        filename = getattr(value, "filename", "")
        if kind == "jpeg" and filename and getattr(value, "format", "") == "JPEG":
            # Store the file as it is: encoding it again would lose quality.
            try:
                with open(filename, "rb") as file:
                    return file.read()
            except FileNotFoundError:
                pass
        out = BytesIO()
        value.save(out, format=kind.upper())
        return out.getvalue()

    return encode


def _pil_image() -> Any:
    try:
        return importlib.import_module("PIL.Image")
    except ImportError:
        raise UnmetNeedError("is of images, which need the package pillow: pip install pillow") from None


def decode_pil(data: bytes | bytearray, start: int, stop: int) -> Any:
    """Return the image that `encode_pil` encoded into data[start:stop]."""
    width, height, mode_bytes = struct.unpack_from("<III", data, start)
    pixels = start + 12 + mode_bytes
    # Every mode has at least one bit a pixel. Check first, because PIL would allocate all pixels.
    if (width + 7) // 8 * height > stop - pixels:
        raise ValueError(f"{stop - pixels} bytes are too few for {width} x {height} pixels")
    return _pil_image().frombytes(
        data[start + 12 : pixels].decode(), (width, height), bytes(data[pixels:stop])
    )


def decode_image(data: bytes | bytearray, start: int, stop: int) -> Any:
    """Return the image of an encoded file in data[start:stop], of any format that PIL knows."""
    image = _pil_image()
    try:
        return image.open(BytesIO(data[start:stop]))
    except image.UnidentifiedImageError:
        begin = bytes(data[start : min(stop, start + 8)])
        raise ValueError(
            f"its {stop - start} bytes are not an image that PIL can read: they begin with {begin!r}"
        ) from None
    except image.DecompressionBombError as problem:
        raise UnmetNeedError(
            f"holds an image that PIL takes for an attack ({problem}): raise PIL.Image.MAX_IMAGE_PIXELS if you trust "
            f"the dataset"
        ) from problem
