"""Images are checked when they are written: a dataset holds none that is cut short."""

import re
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from loader import EncodingError, MDSDataset, MDSWriter
from loader.mds.encodings import encoder

PIXELS = np.random.default_rng(3).integers(0, 256, (48, 64, 3), dtype=np.uint8)


def encoded(kind: str, **options: Any) -> bytes:
    out = BytesIO()
    Image.fromarray(PIXELS).save(out, format=kind, **options)
    return out.getvalue()


def write(out: Path, encoding: str, value: Any) -> Any:
    with MDSWriter(out, {"image": encoding}) as writer:
        writer.write({"image": value})
    return MDSDataset(out)[0]["image"]


THUMBNAIL = (
    b"\xff\xe1" + (2 + 200).to_bytes(2, "big") + (b"\xff\xd8 a small image \xff\xd9").ljust(200, b"\0")
)
WHOLE = {
    "baseline": encoded("JPEG"),
    "progressive": encoded("JPEG", progressive=True),
    "optimised, grey": encoded("JPEG", optimize=True, quality=30),
    "bytes behind its end": encoded("JPEG") + b"\0" * 700,
    "a thumbnail in it": encoded("JPEG")[:2] + THUMBNAIL + encoded("JPEG")[2:],
    "a png in a jpeg column": encoded("PNG"),
    "a webp in a jpeg column": encoded("WEBP"),
    "all but its end marker": encoded("JPEG")[:-2],
}


@pytest.mark.parametrize("kind", WHOLE)
def test_whole_images_are_stored_as_they_are(tmp_path: Path, kind: str) -> None:
    try:
        Image.open(BytesIO(WHOLE[kind])).load()
    except OSError:  # this PIL does not read it either
        with pytest.raises(EncodingError, match="not a whole image"):
            write(tmp_path, "jpeg", WHOLE[kind])
        return
    assert write(tmp_path, "jpeg", WHOLE[kind]).size == (64, 48)
    assert WHOLE[kind] in next(tmp_path.glob("*.mds")).read_bytes()


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "progressive", "thumbnail"])
@pytest.mark.parametrize("part", [0.01, 0.3, 0.6, 0.95])
def test_an_image_that_is_cut_short_is_refused_with_its_column(
    tmp_path: Path, kind: str, part: float
) -> None:
    whole = {
        "progressive": WHOLE["progressive"],
        "thumbnail": WHOLE["a thumbnail in it"],
    }.get(kind) or encoded(kind)
    data = whole[: int(part * len(whole))]
    with pytest.raises(EncodingError, match=f"column 'image': its {len(data)} bytes are not a whole image: "):
        write(tmp_path, "png" if kind == "PNG" else "jpeg", data)
    assert not (tmp_path / "index.json").exists()


@pytest.mark.parametrize("encoding", ["list[jpeg]", "jpeg_array"])
def test_images_in_a_list_are_checked_too(tmp_path: Path, encoding: str) -> None:
    whole = encoded("JPEG")
    with pytest.raises(EncodingError, match="not a whole image"):
        write(tmp_path, encoding, [whole, whole[:-40]])


@pytest.mark.parametrize("encoding", ["list[jpeg]", "jpeg_array", "jpegarray"])
def test_bytes_are_a_list_of_images_only_if_a_reader_can_read_them(tmp_path: Path, encoding: str) -> None:
    whole = encoded("JPEG")
    listed, cut = encoder(encoding)([whole, whole]), encoder("list[png]")([encoded("PNG")])
    assert encoder(encoding)(listed) == listed
    for number, data in enumerate((b"", b"raw", whole, listed[:-40], cut[:-20])):
        with pytest.raises(
            EncodingError, match=f"column 'image': .*(not a valid {re.escape(encoding)}|not a whole)"
        ):
            write(tmp_path / str(number), encoding, data)


@pytest.mark.parametrize(("encoding", "mode"), [("jpeg", "RGBA"), ("png", "CMYK")])
def test_a_mode_that_the_format_lacks_is_named_with_what_to_do(
    tmp_path: Path, encoding: str, mode: str
) -> None:
    with pytest.raises(
        EncodingError, match=rf"'image': an image of mode {mode} is not a valid {encoding}: .*"
    ):
        write(tmp_path, encoding, Image.new(mode, (4, 4)))
    with pytest.raises(AttributeError, match="column 'image': a str is neither a PIL image"):
        write(tmp_path / "other", encoding, "a path")
