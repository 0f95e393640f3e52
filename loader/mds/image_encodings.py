"""Encodes and decodes images in MDS columns (`pil`, `jpeg`, `png`). PIL is imported at the first image column."""

import importlib
import re
import struct
from collections.abc import Callable
from io import BytesIO
from typing import Any

from loader.base.argument_checks import with_article
from loader.errors import EncodingError, UnmetNeedError, ValueTypeError, cause_text

_PNG = b"\x89PNG\r\n\x1a\n"
_PNG_END = b"IEND\xaeB`\x82"
# ISO/IEC 10918-1, table B.1: a JPEG begins with SOI, its compressed data follow SOS, and EOI ends it.
_SOI, _SOS, _EOI = b"\xff\xd8", b"\xff\xda", b"\xff\xd9"
# In compressed data, FF 00 is a byte, FF D0 to FF D7 are restarts, and FF FF is filling. Any other marker ends them.
_NEXT_MARKER = re.compile(rb"\xff[^\x00\xd0-\xd7\xff]")
# What PIL raises for damaged files.
_IMAGE_ERRORS = (
    *(OSError, SyntaxError, ValueError, EOFError, LookupError, TypeError, ArithmeticError, struct.error),
)


def encode_pil(value: Any) -> bytes:
    """Return the pixels of a PIL image with its size and mode."""
    mode: bytes = value.mode.encode()
    return struct.pack("<III", *value.size, len(mode)) + mode + bytes(value.tobytes())


def image_encoder(kind: str) -> Callable[[Any], bytes]:
    """Return the function that encodes a PIL image as jpeg or png."""

    def encode(value: Any) -> bytes:
        if not hasattr(value, "save"):
            raise ValueTypeError(f"{with_article(value)} is neither a PIL image nor an encoded one")
        filename = getattr(value, "filename", "")
        if kind == "jpeg" and filename and getattr(value, "format", "") == "JPEG":
            # Store the file as it is: encoding it again would lose quality.
            try:
                with open(filename, "rb") as file:
                    return checked_image(file.read())
            except FileNotFoundError:
                pass
        out = BytesIO()
        try:
            value.save(out, format=kind.upper())
        except OSError as problem:
            raise EncodingError(
                f"an image of mode {value.mode} is not a valid {kind}: {cause_text(problem)}; convert it first, "
                f'image.convert("RGB"), or use the encoding pil'
            ) from problem
        return out.getvalue()

    return encode


def checked_image(data: bytes) -> bytes:
    """Return the bytes of an image file as they are. Raises EncodingError if they are cut short, or no image.

    A JPEG or PNG that has its end is not decoded. PIL decodes all others, of any format.
    """
    if _is_whole_jpeg(data) or (data.startswith(_PNG) and data.endswith(_PNG_END)):
        return data
    try:
        decode_image(data, 0, len(data)).load()
    except UnmetNeedError:
        raise
    except _IMAGE_ERRORS as problem:
        raise EncodingError(
            f"its {len(data)} bytes are not a whole image: {cause_text(problem)}; leave the sample out, or store them "
            f"unchecked with the encoding bytes"
        ) from problem
    return data


def _is_whole_jpeg(data: bytes) -> bool:
    """Return whether data are a JPEG up to its end, by the chain of its segments."""
    place = len(_SOI) if data.startswith(_SOI) else len(data)
    while place + 4 <= len(data) and data[place] == 0xFF:
        marker = data[place : place + 2]
        place += 2 + int.from_bytes(data[place + 2 : place + 4], "big")
        if marker == _SOS:
            found = _NEXT_MARKER.search(data, place)
            if found is None:
                return False
            place = found.start()
        if data[place : place + 2] == _EOI:
            return True
    return False


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
