"""The structs, opcodes and flags against the kernel's header of this machine."""

import re
import struct
from pathlib import Path

import pytest

from fusecache.fuse import protocol
from fusecache.fuse.protocol import FIELDS, FLAGS, Notify, Opcode

HEADER = Path("/usr/include/linux/fuse.h")
CODES = {"uint16_t": "H", "uint32_t": "I", "uint64_t": "Q", "int32_t": "i", "int64_t": "q"}


@pytest.fixture(scope="module")
def header() -> str:
    return re.sub(r"/\*.*?\*/", "", HEADER.read_text(), flags=re.DOTALL)


def skip_if_older(header: str, name: str, pattern: str) -> None:
    """Skip what a header of before Linux 6.9 (protocol 7.40) lacks."""
    minor = re.search(r"#define FUSE_KERNEL_MINOR_VERSION (\d+)", header)
    assert minor is not None
    if int(minor[1]) < 40 and re.search(pattern, header) is None:
        pytest.skip(f"the header is of protocol 7.{minor[1]}: it has no {name} yet")


def fields_of(header: str, name: str, prefix: str = "") -> list[str]:
    """A struct's fields as `FIELDS` has them; arrays of char at the end are not part of it."""
    found = re.search(rf"struct fuse_{name} \{{(.*?)\}};", header, re.DOTALL)
    assert found is not None, name
    fields = []
    for kind, field, size in re.findall(r"((?:struct )?\w+)\s+(\w+)(\[\w*\])?;", found[1]):
        if kind.startswith("struct "):
            fields += fields_of(header, kind.removeprefix("struct fuse_"), f"{prefix}{field}.")
        elif kind in CODES:
            fields.append(f"{prefix}{field}:{size.strip('[]')}{CODES[kind]}")
        else:
            assert kind == "char", kind
    return fields


def layout(fields: list[str]) -> tuple[dict[str, tuple[int, str]], int]:
    """Where each named field lies, with its type, and the size of all; spare bytes have no name."""
    places, offset = {}, 0
    for field in fields:
        name, _, code = field.rpartition(":")
        if not name.startswith(("unused", "padding", "reserved")):
            places[name] = (offset, code)
        offset += struct.calcsize("<" + code)
    return places, offset


@pytest.mark.parametrize("name", FIELDS)
def test_struct_is_the_kernels(header: str, name: str) -> None:
    """A newer kernel may give a name to bytes that were spare."""
    if name == "backing_map":
        skip_if_older(header, name, "struct fuse_backing_map")
    (ours, size), (theirs, their_size) = layout(FIELDS[name].split()), layout(fields_of(header, name))
    assert ours
    assert ours.items() <= theirs.items()
    assert size == their_size


@pytest.mark.parametrize("name", FIELDS)
def test_struct_has_no_hidden_padding(name: str) -> None:
    """Packed as C aligns it: without padding it is the same layout as the compiler's."""
    codes = "".join(field.rpartition(":")[2] for field in FIELDS[name].split())
    assert struct.calcsize("@" + codes) == struct.calcsize("<" + codes)


@pytest.mark.parametrize("code", Opcode)
def test_opcode_is_the_kernels(header: str, code: Opcode) -> None:
    assert re.search(rf"\bFUSE_{code.name}\s*= {code.value},", header)


@pytest.mark.parametrize("code", Notify)
def test_notification_is_the_kernels(header: str, code: Notify) -> None:
    assert re.search(rf"\bFUSE_NOTIFY_{code.name}\s*= {code.value},", header)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((f"FUSE_{name}", value) for name, value in FLAGS.items()),
        *((name, value) for name, value in vars(protocol).items() if name.startswith(("FATTR_", "FOPEN_"))),
        ("FUSE_FSYNC_FDATASYNC", protocol.FSYNC_FDATASYNC),
    ],
)
def test_flag_is_the_kernels(header: str, name: str, value: int) -> None:
    if "PASSTHROUGH" in name:
        skip_if_older(header, name, rf"#define {name}\s")
    assert re.search(rf"#define {name}\s+\(1(ULL)? << {value.bit_length() - 1}\)", header)


def test_backing_ioctls_are_the_kernels() -> None:
    """As asm-generic/ioctl.h makes them: direction (write), size, type, number."""
    assert 1 << 30 | protocol.BACKING_MAP.size << 16 | 229 << 8 | 1 == protocol.FUSE_DEV_IOC_BACKING_OPEN
    assert protocol.FUSE_DEV_IOC_BACKING_CLOSE == 1 << 30 | 4 << 16 | 229 << 8 | 2
