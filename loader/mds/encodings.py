"""Encodes and decodes the values of MDS columns; the functions are compiled once per schema.

A decoder takes (data, start, stop) rather than a slice, so arrays are views into the sample's bytes without a copy. If
a sample has arrays, its bytes are its own bytearray, so the arrays are writable. `pkl` can run code that comes with the
dataset, so it is rejected unless the caller allows it.

Encodes and decodes images in MDS columns (`pil`, `jpeg`, `png`). PIL is imported at the first image column.
"""

import importlib
import json
import operator
import pickle
import re
import struct
from collections.abc import Callable, Iterable, Sequence
from decimal import Decimal
from functools import partial
from io import BytesIO
from itertools import accumulate, starmap
from typing import Any

import numpy as np

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


Encoder = Callable[[Any], bytes]
Buffer = bytes | bytearray
Decoder = Callable[[Buffer, int, int], Any]
SampleDecoder = Callable[[Buffer], dict[str, Any]]
# (bytes before the value, bytes after it, function that makes the samples of [(value, all other bytes)])
BlobDecoder = tuple[int, int, Callable[[Iterable[tuple[bytes, bytearray]]], Iterable[dict[str, Any]]]]

SCALARS = (
    *(f"{kind}{bits}" for kind in ("uint", "int") for bits in (8, 16, 32, 64)),
    *("float16", "float32", "float64"),
)
# The dtype byte of an `ndarray` value.
DTYPE_CODES = {
    "uint8": 8,
    "int8": 9,
    "uint16": 16,
    "int16": 17,
    "float16": 18,
    "uint32": 32,
    "int32": 33,
    "float32": 34,
    "uint64": 64,
    "int64": 65,
    "float64": 66,
}
_DTYPES = {code: np.dtype(name).newbyteorder("<") for name, code in DTYPE_CODES.items()}
NAMES = (
    *("bytes", "str", "json", "int", "str_int", "str_float", "str_decimal", "ndarray", "pil", "jpeg", "png"),
    *("jpeg_array", "jpegarray", "list[pil]", "list[jpeg]", "list[png]", "pkl"),
    *SCALARS,
)
# What an encoding stores: the table of docs/datasets.md, and of `convert --help`.
MEANINGS = {
    "bytes": "bytes, as they are",
    "str": "text",
    "json": "what JSON can hold, also null",
    "int": "a whole number of 64 bits",
    "int8 … int64, uint8 … uint64": "a whole number of so many bits",
    "float16, float32, float64": "a number; a shorter one loses digits",
    "str_int, str_float, str_decimal": "a number of any size, as text",
    "ndarray:DTYPE:SHAPE": "an array of one shape, as in ndarray:float32:3,224,224; with ndarray:DTYPE of any shape, "
    "with ndarray also of any type",
    "jpeg, png": "an image: the bytes of its file as they are, if it is whole",
    "pil": "an image: its pixels, uncompressed",
    "list[jpeg], list[png], list[pil], jpeg_array": "several images",
    "pkl": "any object of Python; a reader must allow it, as it can run code",
}
ENCODINGS_TEXT = "Encodings:\n" + "\n".join(f"  {name:<46} {text}" for name, text in MEANINGS.items())
# Encodings whose bytes are a file of an image.
_IMAGE_FILES = ("jpeg", "png")
# Encodings of lists of such files, and the bytes before a list.
_IMAGE_LISTS = {"jpeg_array": 0, "jpegarray": 0, "list[jpeg]": 4, "list[png]": 4}
MOST_AXES = 63
_ENCODE_ERRORS = (ValueError, OverflowError, OSError, RecursionError, pickle.PicklingError, struct.error)
# The errors of the decoders below, of json, pickle and PIL, for damaged bytes or missing packages.
_DECODE_ERRORS = (
    *(ValueError, LookupError, TypeError, ArithmeticError, OSError, EOFError, RuntimeError, MemoryError),
    *(ImportError, AttributeError, struct.error, pickle.UnpicklingError, UnmetNeedError),
)


def column_bytes(encoding: str) -> int:
    """Return the size of every value of an encoding in bytes, 0 if it varies.

    Raises EncodingError if the encoding is unknown.
    """
    _check(encoding)
    if encoding == "int":
        return 8
    if encoding in SCALARS:
        return np.dtype(encoding).itemsize
    dtype, shape = array_details(encoding) if encoding.startswith("ndarray") else (None, None)
    return dtype.itemsize * int(np.prod(shape)) if dtype is not None and shape is not None else 0


def makes_views(encoding: str) -> bool:
    """Return whether values of this encoding are views into the sample's bytes, which must then be writable."""
    return encoding.startswith("ndarray")


def encoder(encoding: str) -> Encoder:
    """Return the function that encodes one value. It passes values of type bytes through as already encoded, except
    for `pkl`, text and numbers written as text. It raises EncodingError for a value that does not fit, and for bytes
    that are no whole image, or no list of such.
    """
    _check(encoding)
    encode = _raw_encoder(encoding)
    takes_bytes = encoding != "pkl" and not encoding.startswith(("str", "json"))

    head = _IMAGE_LISTS.get(encoding, 0)
    images = _list_decoder(lambda data, start, stop: checked_image(bytes(data[start:stop])), head)

    def checked(value: Any) -> bytes:
        try:
            if takes_bytes and isinstance(value, bytes):
                if encoding in _IMAGE_LISTS and bytes(head) + _join(images(value, 0, len(value))) != value:
                    raise ValueError("its bytes are no list of images")
                return checked_image(value) if encoding in _IMAGE_FILES else value
            return encode(value)
        except EncodingError:
            raise
        except (TypeError, AttributeError) as problem:
            raise ValueTypeError(
                f"{with_article(value)} is not a valid {encoding}: {cause_text(problem)}"
            ) from problem
        except _ENCODE_ERRORS as problem:
            raise EncodingError(
                f"{with_article(value)} is not a valid {encoding}: {cause_text(problem)}"
            ) from problem

    return checked


def decoder(encoding: str, *, allow_pickle: bool = False) -> Decoder:
    """Return the function that decodes data[start:stop].

    Raises EncodingError for an unknown encoding, or for a pickle that is not allowed.
    """
    _check(encoding)
    if encoding == "pkl":
        if not allow_pickle:
            raise EncodingError(
                "the column is pickled, and pickles run code: pass allow_pickle=True if you trust it"
            )
        return lambda data, start, stop: pickle.loads(data[start:stop])
    simple = _SIMPLE_DECODERS.get(encoding)
    if simple is not None:
        return simple
    if encoding in SCALARS or encoding == "int":
        return _scalar_decoder(encoding)
    if encoding.startswith("ndarray"):
        return _array_decoder(encoding)
    if encoding.startswith("list["):
        return _list_decoder(decoder(encoding[5:-1]), head_bytes=4)
    return _list_decoder(decode_image, head_bytes=0)


def sample_decoder(
    names: Sequence[str], encodings: Sequence[str], sizes: Sequence[int], *, allow_pickle: bool
) -> SampleDecoder:
    """Return the function that decodes a sample's bytes into its dict.

    sizes: bytes of each column, 0 for variable ones. The function raises EncodingError, naming the column, for bytes
    that cannot be decoded, and for a sample that is longer or shorter than its columns.
    """
    decoders = []
    for name, encoding, size in zip(names, encodings, sizes, strict=True):
        try:
            decoders.append(_sized(decoder(encoding, allow_pickle=allow_pickle), encoding, size))
        except EncodingError as problem:
            raise EncodingError(f"column {name!r}: {problem}") from None
    if all(sizes):
        return _fixed_sample_decoder(names, decoders, sizes)
    columns = list(zip(names, decoders, sizes, strict=True))
    head = struct.Struct(f"<{sum(not size for size in sizes)}I")

    def decode(data: Buffer) -> dict[str, Any]:
        sample: dict[str, Any] = {}
        name = None
        try:
            variable = iter(head.unpack_from(data))
            stop = head.size
            for name, decode_column, size in columns:
                start, stop = stop, stop + (size or next(variable))
                sample[name] = decode_column(data, start, stop)
        except _DECODE_ERRORS as problem:
            if name is None:
                raise EncodingError(head_text(len(data), head.size)) from problem
            if stop > len(data) and not isinstance(problem, UnmetNeedError):
                raise EncodingError(
                    f"column {name!r} does not decode: by the sizes in the sample it ends at byte {stop}, outside the "
                    f"sample's {len(data)}"
                ) from problem
            raise _undecoded(f"column {name!r}", problem) from problem
        if stop != len(data):
            raise EncodingError(f"the columns take {stop} bytes, but the sample has {len(data)}")
        return sample

    return decode


def blob_decoder(
    names: Sequence[str], encodings: Sequence[str], sizes: Sequence[int], *, allow_pickle: bool
) -> BlobDecoder | None:
    """Return (bytes before, bytes after, decoder of [(value, rest)]) for schemas with one value of variable size.

    None for other schemas, and if the value would be a view, because it is copied separately here. The decoder makes
    one sample after the other, and raises EncodingError at a damaged one. This function raises EncodingError as
    sample_decoder does.
    """
    varying = [number for number, size in enumerate(sizes) if not size]
    if len(varying) != 1 or makes_views(encodings[varying[0]]) or column_bytes(encodings[varying[0]]):
        return None
    place = varying[0]
    name, decode_value = names[place], decoder(encodings[place], allow_pickle=allow_pickle)
    others = [number for number in range(len(names)) if number != place]
    decode_rest = sample_decoder(
        [names[number] for number in others],
        [encodings[number] for number in others],
        [sizes[number] for number in others],
        allow_pickle=False,
    )
    if encodings[place] == "bytes" and not others:
        return 0, 0, lambda found: ({name: value} for value, _ in found)

    def decode(value: bytes, rest: bytearray) -> dict[str, Any]:
        try:
            found = decode_value(value, 0, len(value))
        except _DECODE_ERRORS as problem:
            raise _undecoded(f"column {name!r}", problem) from problem
        if not others:
            return {name: found}
        sample = decode_rest(rest)
        sample[name] = found
        return {column: sample[column] for column in names}

    return sum(sizes[:place]), sum(sizes[place + 1 :]), partial(starmap, decode)


def _fixed_sample_decoder(
    names: Sequence[str], decoders: Sequence[Decoder], sizes: Sequence[int]
) -> SampleDecoder:
    """Return a decoder for fixed offsets, which need no computation for each sample."""
    stops = list(accumulate(sizes))
    places = [
        (name, decode, stop - size, stop)
        for name, decode, size, stop in zip(names, decoders, sizes, stops, strict=True)
    ]
    total = stops[-1] if stops else 0

    def decode(data: Buffer) -> dict[str, Any]:
        if len(data) != total:
            raise EncodingError(f"the columns take {total} bytes, but the sample has {len(data)}")
        try:
            return {name: decode_column(data, start, stop) for name, decode_column, start, stop in places}
        except _DECODE_ERRORS as problem:
            raise _undecoded(f"a column of {', '.join(names)}", problem) from problem

    return decode


def head_text(sample_bytes: int, head_bytes: int) -> str:
    """Return the error text for a sample that ends within the sizes of its values."""
    count = f"{sample_bytes} byte{'' if sample_bytes == 1 else 's'}"
    return f"the sample has {count}, its values' sizes alone take {head_bytes}"


def _undecoded(column: str, problem: BaseException) -> EncodingError:
    """Return the error for a value that cannot be decoded, or not in this environment."""
    if isinstance(problem, UnmetNeedError):
        return UnmetNeedError(f"{column} {problem}")
    if isinstance(problem, (ImportError, AttributeError)):
        return UnmetNeedError(
            f"{column} does not decode: {cause_text(problem)}: install the package that its pickled objects are "
            f"of, in the version that wrote them"
        )
    return EncodingError(f"{column} does not decode: {cause_text(problem)}")


def _sized(decode: Decoder, encoding: str, size: int) -> Decoder:
    """Check that a value of a fixed-size encoding has exactly the bytes that the decoder reads."""
    needed = column_bytes(encoding)
    if not needed or needed == size:
        return decode
    if size:
        raise EncodingError(f"the index gives it {size} bytes, but {encoding} has {needed}")

    def decode_checked(data: Buffer, start: int, stop: int) -> Any:
        if stop - start != needed:
            raise ValueError(f"{stop - start} bytes, but {encoding} has {needed}")
        return decode(data, start, stop)

    return decode_checked


def _check(encoding: str) -> None:
    name, colon, _ = encoding.partition(":")
    if name not in NAMES or (colon and name != "ndarray"):
        raise EncodingError(f"encoding {encoding!r} is unknown: choose one of {', '.join(NAMES)}")
    if colon:
        array_details(encoding)


def array_details(encoding: str) -> tuple[np.dtype[Any] | None, tuple[int, ...] | None]:
    """Return dtype and shape of `ndarray:...`; None for what each value stores itself. Raises EncodingError."""
    parts = encoding.split(":")[1:]
    if parts in ([], [""]):  # MosaicML's library accepts "ndarray:" too
        return None, None
    if len(parts) > 2 or parts[0] not in DTYPE_CODES:
        raise EncodingError(f"encoding {encoding!r}: expected ndarray[:dtype[:d0,d1...]]")
    dtype = np.dtype(parts[0]).newbyteorder("<")
    if len(parts) == 1:
        return dtype, None
    dimensions = parts[1].split(",")
    if not all(dimension.isdecimal() and int(dimension) > 0 for dimension in dimensions):
        raise EncodingError(f"encoding {encoding!r}: dimensions are positive numbers")
    return dtype, tuple(int(dimension) for dimension in dimensions)


# Encoders


def _raw_encoder(encoding: str) -> Encoder:
    if encoding == "int":
        return _whole_encoder("int", 8, signed=True)
    if encoding in SCALARS:
        return _scalar_encoder(encoding)
    if encoding.startswith("ndarray"):
        return _array_encoder(encoding)
    if encoding.startswith("list["):
        element = encoder(encoding[5:-1])
        return lambda value: bytes(4) + _join([element(item) for item in _items(value)])
    if encoding in ("jpeg_array", "jpegarray"):
        image = encoder("jpeg")
        return lambda value: _join(
            [image(bytes(item) if isinstance(item, (bytearray, memoryview)) else item) for item in value]
        )
    return _SIMPLE_ENCODERS[encoding]


def _encode_bytes(value: Any) -> bytes:
    if not isinstance(value, (bytearray, memoryview)):  # `encoder` has passed bytes through already
        raise ValueTypeError(f"{with_article(value)} is not bytes")
    return bytes(value)


def _encode_text(value: Any) -> bytes:
    if not isinstance(value, str):
        raise ValueTypeError(f"{with_article(value)} is not text")
    return value.encode()


def _encode_json(value: Any) -> bytes:
    return json.dumps(value.tolist() if isinstance(value, np.ndarray) else value).encode()


def _text_of(kind: type) -> Encoder:
    def encode(value: Any) -> bytes:
        # The text "True" would not decode to a number.
        if not isinstance(value, kind) or isinstance(value, bool):
            raise ValueTypeError(f"{with_article(value)} is not a valid {kind.__name__}")
        return str(value).encode()

    return encode


def _scalar_encoder(encoding: str) -> Encoder:
    dtype = np.dtype(encoding).newbyteorder("<")
    if dtype.kind == "f":
        return lambda value: np.array(float(value), dtype).tobytes()
    return _whole_encoder(encoding, dtype.itemsize, signed=dtype.kind == "i")


def _whole_encoder(encoding: str, size: int, *, signed: bool) -> Encoder:
    def encode(value: Any) -> bytes:
        number = operator.index(value)
        try:
            return number.to_bytes(size, "little", signed=signed)
        except OverflowError:
            bits = 8 * size - signed
            low = -(1 << bits) if signed else 0
            raise EncodingError(
                f"{number} is out of range for {encoding}, which is {low} to {(1 << bits) - 1}"
            ) from None

    return encode


def _array_encoder(encoding: str) -> Encoder:
    dtype, shape = array_details(encoding)

    def encode(value: Any) -> bytes:
        if not isinstance(value, np.ndarray):
            raise ValueTypeError(f"{with_article(value)} is not an array")
        code = DTYPE_CODES.get(value.dtype.name)
        if code is None or (dtype is not None and value.dtype.name != dtype.name):
            raise EncodingError(f"an array of {value.dtype.name} does not fit {encoding}")
        if shape is not None and value.shape != shape:
            raise EncodingError(f"an array of shape {value.shape} does not fit {encoding}")
        if not 1 <= value.ndim <= MOST_AXES or value.size == 0:
            raise EncodingError(f"an array of shape {value.shape} cannot be stored: 1 to 63 axes, none empty")
        head = bytes([code]) if dtype is None else b""
        if shape is None:
            width = sum(max(value.shape) >= 1 << bits for bits in (8, 16, 32))
            head += bytes([value.ndim << 2 | width])
            head += b"".join(axis.to_bytes(1 << width, "little") for axis in value.shape)
        return head + bytes(value.astype(value.dtype.newbyteorder("<"), copy=False).tobytes())

    return encode


def _items(value: Any) -> Iterable[Any]:
    if not isinstance(value, (list, tuple)):
        raise ValueTypeError(f"{with_article(value)} is not a list")
    return value


def _join(parts: list[bytes]) -> bytes:
    return struct.pack(f"<{1 + len(parts)}I", len(parts), *map(len, parts)) + b"".join(parts)


_SIMPLE_ENCODERS: dict[str, Encoder] = {
    "bytes": _encode_bytes,
    "str": _encode_text,
    "json": _encode_json,
    "str_int": _text_of(int),
    "str_float": _text_of(float),
    "str_decimal": _text_of(Decimal),
    "pil": encode_pil,
    "jpeg": image_encoder("jpeg"),
    "png": image_encoder("png"),
    "pkl": pickle.dumps,
}


# Decoders


def _decode_bytes(data: Buffer, start: int, stop: int) -> bytes:
    # One copy instead of two if the sample is a bytearray.
    return data[start:stop] if isinstance(data, bytes) else bytes(memoryview(data)[start:stop])


def _scalar_decoder(encoding: str) -> Decoder:
    if encoding == "int":
        return lambda data, start, stop: int.from_bytes(data[start:stop], "little", signed=True)
    dtype = np.dtype(encoding).newbyteorder("<")
    return lambda data, start, stop: np.frombuffer(data, dtype, 1, start)[0]


def _array_decoder(encoding: str) -> Decoder:
    fixed_dtype, fixed_shape = array_details(encoding)
    if fixed_dtype is not None and fixed_shape is not None:
        dtype, shape, count = fixed_dtype, fixed_shape, int(np.prod(fixed_shape))
        if len(shape) == 1:
            return lambda data, start, stop: np.frombuffer(data, dtype, count, start)
        return lambda data, start, stop: np.frombuffer(data, dtype, count, start).reshape(shape)

    def decode(data: Buffer, start: int, stop: int) -> Any:
        if start >= stop:
            raise ValueError("no bytes for an array")
        dtype = fixed_dtype
        if dtype is None:
            dtype = _DTYPES[data[start]]
            start += 1
        axes, width = data[start] >> 2, 1 << (data[start] & 3)
        values = start + 1 + axes * width
        shape = [int.from_bytes(data[at : at + width], "little") for at in range(start + 1, values, width)]
        if values > stop:
            raise ValueError("the shape of an array goes beyond its bytes")
        count, rest = divmod(stop - values, dtype.itemsize)
        if rest:
            raise ValueError(f"{stop - values} bytes are not a multiple of the size of {dtype.name}")
        return np.frombuffer(data, dtype, count, values).reshape(shape)

    return decode


def _list_decoder(element: Decoder, head_bytes: int) -> Decoder:
    def decode(data: Buffer, start: int, stop: int) -> list[Any]:
        start += head_bytes
        (count,) = struct.unpack_from("<I", data, start)
        end = start + 4 + 4 * count
        if end > stop:
            raise ValueError(f"{count} elements do not fit into {stop - start} bytes")
        elements = []
        for size in struct.unpack_from(f"<{count}I", data, start + 4):
            begin, end = end, end + size
            if end > stop:
                raise ValueError("an element goes beyond its column")
            elements.append(element(data, begin, end))
        return elements

    return decode


_SIMPLE_DECODERS: dict[str, Decoder] = {
    "bytes": _decode_bytes,
    "str": lambda data, start, stop: data[start:stop].decode(),
    "json": lambda data, start, stop: json.loads(data[start:stop]),
    "str_int": lambda data, start, stop: int(data[start:stop]),
    "str_float": lambda data, start, stop: float(data[start:stop]),
    "str_decimal": lambda data, start, stop: Decimal(data[start:stop].decode()),
    "pil": decode_pil,
    "jpeg": decode_image,
    "png": decode_image,
}
