"""Column encodings: every value comes back, in the bytes that the MDS format prescribes."""

import contextlib
import struct
import zlib
from decimal import Decimal
from io import BytesIO
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from PIL import Image, ImageChops

from loader.errors import EncodingError, UnmetNeedError
from loader.mds.encodings import (
    DTYPE_CODES,
    SCALARS,
    blob_decoder,
    column_bytes,
    decoder,
    encoder,
    sample_decoder,
)
from tests.support.real_streaming import import_streaming

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "bytes": st.binary(),
    "str": st.text(),
    "json": JSON,
    "int": st.integers(-(2**63), 2**63 - 1),
    "str_int": st.integers(),
    "str_float": st.floats(allow_nan=False),
    "str_decimal": st.decimals(allow_nan=False, allow_infinity=False),
    "pkl": JSON,
}
ARRAYS = st.sampled_from(sorted(DTYPE_CODES)).flatmap(
    lambda name: hnp.arrays(name, hnp.array_shapes(max_dims=4, max_side=5))
)
BIG_AXIS = np.arange(70_000, dtype=np.uint16)


def through(encoding: str, value: Any) -> Any:
    data = encoder(encoding)(value)
    return decoder(encoding, allow_pickle=True)(bytearray(b"xy" + data + b"z"), 2, 2 + len(data))


def picture(mode: str = "RGB") -> Image.Image:
    pixels = np.random.default_rng(0).integers(0, 255, (7, 5, 3), np.uint8)
    return Image.fromarray(pixels).convert(mode)


def jpeg_bytes() -> bytes:
    out = BytesIO()
    picture().save(out, format="JPEG")
    return out.getvalue()


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


def huge_png() -> bytes:
    """More pixels than PIL opens by itself, in a few bytes: only its head is looked at."""
    out = BytesIO()
    Image.new("1", (8, 8)).save(out, format="PNG")
    data = bytearray(out.getvalue())
    data[16:24] = struct.pack(">II", 20_000, 20_000)
    data[29:33] = struct.pack(">I", zlib.crc32(data[12:29]))
    return bytes(data)


@pytest.fixture(scope="module")
def library() -> Any:
    """The encodings of the real library."""
    import_streaming()
    from streaming.base.format.mds import encodings

    return encodings


@pytest.mark.parametrize("encoding", VALUES)
def test_values_come_back_and_the_bytes_are_the_librarys(library: Any, encoding: str) -> None:
    @settings(max_examples=40, deadline=None)
    @given(VALUES[encoding])
    def check(value: Any) -> None:
        assert through(encoding, value) == value
        if encoding != "pkl":
            assert encoder(encoding)(value) == library.mds_encode(encoding, value)

    check()


@pytest.mark.parametrize("encoding", SCALARS)
def test_scalars_come_back_and_the_bytes_are_the_librarys(library: Any, encoding: str) -> None:
    dtype = np.dtype(encoding)

    @settings(max_examples=20, deadline=None)
    @given(hnp.from_dtype(dtype, allow_nan=False))
    def check(value: Any) -> None:
        plain = value.item()
        found = through(encoding, plain)
        assert found == value
        assert found.dtype == dtype
        assert encoder(encoding)(plain) == library.mds_encode(encoding, plain)
        assert column_bytes(encoding) == dtype.itemsize

    check()


@settings(max_examples=80, deadline=None)
@given(ARRAYS)
def test_arrays_come_back_with_dtype_and_shape(value: np.ndarray[Any, Any]) -> None:
    dtype, shape = value.dtype.name, ",".join(map(str, value.shape))
    for encoding in ("ndarray", f"ndarray:{dtype}", f"ndarray:{dtype}:{shape}"):
        found = through(encoding, value)
        assert found.dtype == value.dtype
        assert found.shape == value.shape
        assert found.tobytes() == value.tobytes()
        assert found.flags.writeable
    assert column_bytes(encoding) == value.nbytes


@settings(max_examples=40, deadline=None)
@given(ARRAYS)
def test_arrays_have_the_librarys_bytes(library: Any, value: np.ndarray[Any, Any]) -> None:
    dtype, shape = value.dtype.name, ",".join(map(str, value.shape))
    for encoding in ("ndarray", f"ndarray:{dtype}", f"ndarray:{dtype}:{shape}"):
        assert encoder(encoding)(value) == library.mds_encode(encoding, value)


@pytest.mark.parametrize("value", [BIG_AXIS, BIG_AXIS[:300], BIG_AXIS[:255], BIG_AXIS[:256].reshape(1, 256)])
def test_the_shape_takes_the_smallest_number_that_holds_every_axis(library: Any, value: Any) -> None:
    assert encoder("ndarray")(value) == library.mds_encode("ndarray", value)
    assert np.array_equal(through("ndarray", value), value)


def test_big_endian_and_strided_arrays_are_stored_little_endian_and_in_c_order() -> None:
    value = np.arange(12, dtype=">i4").reshape(3, 4).T
    assert np.array_equal(through("ndarray", value), value)


@pytest.mark.parametrize("mode", ["RGB", "L", "RGBA", "1"])
def test_pil_and_png_keep_every_pixel(library: Any, mode: str) -> None:
    image = picture(mode)
    for encoding in ("pil", "png"):
        found = through(encoding, image)
        assert found.mode == mode
        assert found.tobytes() == image.tobytes()
        assert encoder(encoding)(image) == library.mds_encode(encoding, image)


def test_jpeg_is_stored_as_given_and_decoded_lazily() -> None:
    data = jpeg_bytes()
    found = through("jpeg", data)
    assert found.format == "JPEG"
    assert ImageChops.difference(found, Image.open(BytesIO(data))).getbbox() is None
    assert encoder("jpeg")(picture()) == data


@pytest.mark.parametrize("encoding", ["jpeg_array", "jpegarray"])
def test_jpeg_arrays_come_back(library: Any, encoding: str) -> None:
    blobs = [jpeg_bytes(), jpeg_bytes()]
    assert [image.size for image in through(encoding, blobs)] == [(5, 7)] * 2
    assert encoder(encoding)(blobs) == library.mds_encode(encoding, blobs)


@pytest.mark.parametrize("kind", ["pil", "jpeg", "png"])
def test_lists_of_images_come_back(library: Any, kind: str) -> None:
    images = [picture(), picture("L")]
    encoding = f"list[{kind}]"
    assert [image.mode for image in through(encoding, images)] == ["RGB", "L"]
    assert through(encoding, []) == []
    assert encoder(encoding)(images) == library.mds_encode(encoding, images)


def test_a_pickle_is_refused_unless_allowed() -> None:
    with pytest.raises(EncodingError, match="allow_pickle"):
        decoder("pkl")
    assert through("pkl", b"bytes are pickled, too") == b"bytes are pickled, too"


@pytest.mark.parametrize(
    ("encoding", "value"),
    [
        ("int", "1"),
        ("int", 2**63),
        ("int", 1.5),
        ("uint8", 256),
        ("uint8", -1),
        ("int16", 1.5),
        ("float32", "x"),
        ("str", 3),
        ("str", b"bytes"),
        ("bytes", "text"),
        ("json", {1, 2}),
        ("str_int", "12"),
        ("str_decimal", 1.0),
        ("ndarray", [1, 2]),
        ("ndarray", np.array(3)),
        ("ndarray", np.zeros((2, 0))),
        ("ndarray", np.array(["text"])),
        ("ndarray:int32", np.zeros(3, np.int64)),
        ("ndarray:int32:4", np.zeros(3, np.int32)),
        ("jpeg", "a/path.jpg"),
        ("pil", np.zeros((2, 2))),
        ("list[png]", picture()),
        ("jpeg_array", [3]),
        ("json", nested(100_000)),
        ("pkl", nested(100_000)),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_a_value_that_does_not_fit_is_an_error(encoding: str, value: Any) -> None:
    with pytest.raises(EncodingError):
        encoder(encoding)(value)


@pytest.mark.parametrize(
    "encoding",
    ["", "int128", "ndarray:complex64", "ndarray:int32:0", "ndarray:int32:a", "int:3", "list[int]"],
)
def test_an_unknown_encoding_is_an_error(encoding: str) -> None:
    for make in (encoder, decoder, column_bytes):
        with pytest.raises(EncodingError, match="encoding"):
            make(encoding)


@pytest.mark.parametrize(
    ("encoding", "data"),
    [
        ("str", b"\xff"),
        ("json", b"{"),
        ("int", b""),
        ("str_decimal", b"x"),
        ("ndarray", b""),
        ("ndarray", b"\x07\x04\x01"),
        ("ndarray:int32", b"\x04\x02\x00\x00\x00\x00"),
        ("ndarray:int32", b"\x0f\x02"),
        ("pil", b"\x01"),
        ("list[png]", struct.pack("<III", 0, 1, 9)),
        ("jpeg_array", struct.pack("<I", 1 << 30)),
        ("json", b"[" * 200_000),
        ("pil", struct.pack("<III", 2**31 - 1, 2**31 - 1, 3) + b"RGB"),
        ("pil", struct.pack("<III", 60_000, 60_000, 3) + b"RGB"),
        ("pkl", b"("),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_damaged_bytes_are_an_error_that_names_the_column(encoding: str, data: bytes) -> None:
    for at_once in (False, True):
        with pytest.raises(EncodingError, match=r"^column 'it' does not decode: \S"):
            decode_alone(data, encoding, at_once=at_once)


def decode_alone(data: bytes, encoding: str, *, at_once: bool) -> Any:
    """Decode a sample's only value. at_once: read by itself, as large ones are, where there is a way to."""
    blob = blob_decoder(["it"], [encoding], [0], allow_pickle=True) if at_once else None
    if blob is not None:
        return next(iter(blob[2]([(data, bytearray())])))
    decode = sample_decoder(["it"], [encoding], [0], allow_pickle=True)
    return decode(bytearray(struct.pack("<I", len(data)) + data))


@pytest.mark.parametrize(
    ("encoding", "data", "told"),
    [
        ("png", huge_png(), r"raise PIL\.Image\.MAX_IMAGE_PIXELS"),
        ("list[png]", struct.pack("<III", 0, 1, len(huge_png())) + huge_png(), r"MAX_IMAGE_PIXELS"),
        ("pkl", b"cno_such_module\nThing\n.", r"no_such_module.*install the package"),
        ("pkl", b"cos\nno_such_name\n.", r"no_such_name.*install the package"),
    ],
    ids=["png", "list", "module", "class"],
)
@pytest.mark.parametrize("at_once", [False, True])
def test_a_sound_value_that_needs_what_is_not_here_says_what(
    encoding: str, data: bytes, told: str, *, at_once: bool
) -> None:
    with pytest.raises(UnmetNeedError, match=rf"^column 'it'.*{told}"):
        decode_alone(data, encoding, at_once=at_once)


def test_an_image_that_pil_finds_too_large_opens_where_its_limit_is_raised(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 400_000_000)
    assert decoder("png")(huge_png(), 0, len(huge_png())).size == (20_000, 20_000)


def test_a_sample_that_ends_in_the_sizes_of_its_values_says_so() -> None:
    decode = sample_decoder(["a", "b"], ["str", "str"], [0, 0], allow_pickle=False)
    with pytest.raises(EncodingError, match="the sample has 7 bytes, its values' sizes alone take 8"):
        decode(bytearray(7))


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=40))
def test_any_bytes_decode_or_are_an_encoding_error(data: bytes) -> None:
    names = ["a", "b", "c", "d"]
    decode = sample_decoder(names, ["ndarray", "int", "str_float", "json"], [0, 8, 0, 0], allow_pickle=False)
    with contextlib.suppress(EncodingError):
        assert set(decode(bytearray(data))) == set(names)


def test_a_size_of_zero_means_variable_and_columns_keep_their_order() -> None:
    decode = sample_decoder(["x", "a"], ["str", "int"], [0, 8], allow_pickle=False)
    assert decode(bytearray(struct.pack("<I", 2) + b"hi" + struct.pack("<q", -5))) == {"x": "hi", "a": -5}


def test_decimals_keep_their_digits() -> None:
    assert str(through("str_decimal", Decimal("1.100"))) == "1.100"
