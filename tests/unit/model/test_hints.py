"""The wire format of hints: what is written is read; what breaks a rule is refused whole."""

import contextlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusecache.model.hints import (
    LONGEST_MESSAGE_BYTES,
    TO_THE_END,
    HintError,
    decode_cursor,
    decode_plan,
    encode_cursor,
    encode_plan,
    is_job,
)

names = st.text(st.characters(codec="utf-8", exclude_characters="/\0"), min_size=1, max_size=8).filter(
    lambda name: name not in {".", "..", ".fusecache"}
)
paths = st.lists(st.lists(names, min_size=1, max_size=3).map("/".join), unique=True, min_size=1, max_size=5)


@st.composite
def plans(draw: st.DrawFn) -> dict:
    files = sorted(draw(paths))
    rows = draw(
        st.lists(
            st.tuples(
                st.integers(0, len(files) - 1),
                st.integers(0, TO_THE_END),
                st.integers(1, TO_THE_END),
                st.integers(0, 10**6),
                st.integers(0, 10**6),
            ),
            max_size=20,
        )
    )
    rows.sort(key=lambda row: row[3])
    columns = list(zip(*rows, strict=True)) or [()] * 5
    return {
        "window": draw(st.integers(0, 10**6)),
        "is_exact": draw(st.booleans()),
        "step": draw(st.integers(0, 10**9)),
        "paths": files,
        **dict(zip(("path", "start", "length", "first", "span"), map(list, columns), strict=True)),
    }


def plan_of(**changes) -> bytes:
    return encode_plan(
        **{
            "window": 0,
            "step": 0,
            "paths": ["a", "b"],
            "path": [0, 1],
            "start": [0, 5],
            "length": [3, TO_THE_END],
            "first": [1, 2],
            "span": [0, 7],
            **changes,
        }
    )


@given(plans())
def test_what_is_written_is_read(plan: dict) -> None:
    found = decode_plan(encode_plan(**plan))
    assert {
        name: list(value) if name not in {"window", "step", "is_exact"} else value
        for name, value in plan.items()
    } == {
        "window": found.window,
        "is_exact": found.is_exact,
        "step": found.step,
        "paths": found.paths,
        "path": list(found.path),
        "start": list(found.start),
        "length": list(found.length),
        "first": list(found.first),
        "span": list(found.span),
    }


@given(plans(), st.data())
def test_a_damaged_message_is_refused_or_is_another_plan_and_never_an_accident(plan: dict, data) -> None:
    message = bytearray(encode_plan(**plan))
    for _ in range(data.draw(st.integers(1, 3))):
        message[data.draw(st.integers(0, len(message) - 1))] = data.draw(st.integers(0, 255))
    del message[len(message) - data.draw(st.integers(0, 3)) :]
    with contextlib.suppress(HintError):
        decode_plan(message)


@pytest.mark.parametrize(
    "path", ["/a", "a/", "a//b", "..", "../a", "a/../../b", ".", "a/./b", "", ".fusecache/hints/x"]
)
def test_a_path_that_leaves_the_mount_is_refused(path: str) -> None:
    with pytest.raises(HintError):
        plan_of(paths=sorted([path, "b"]), path=[0, 1])
    if path:
        honest = plan_of(paths=sorted(["x" * len(path.encode()), "b"]))
        with pytest.raises(HintError):
            decode_plan(honest.replace(b"x" * len(path.encode()), path.encode()))


@pytest.mark.parametrize(
    "change",
    [
        {"paths": ["b", "a"]},
        {"path": [0, 2]},
        {"path": [-1, 0]},
        {"start": [-1, 0]},
        {"length": [0, 1]},
        {"length": [1]},
        {"first": [2, 1]},
        {"first": [-1, 1]},
        {"span": [0, -1]},
        {"span": [0, 1 << 60]},
        {"start": [0, TO_THE_END + 1]},
    ],
)
def test_columns_that_contradict_themselves_are_refused(change: dict) -> None:
    with pytest.raises(HintError):
        plan_of(**change)


def test_other_versions_and_other_things_are_refused() -> None:
    header, _, rest = plan_of().partition(b"\n")
    for change in (
        {"version": 2},
        {"fusecache": "cursor"},
        {"step": -1},
        {"window": True},
        {"exact": 1},
        {"extents": 3},
        {"paths": 1},
    ):
        with pytest.raises(HintError):
            decode_plan(json.dumps({**json.loads(header), **change}).encode() + b"\n" + rest)
    for message in (b"", b"\n", b"{}\n", b"[1]\n", b"no line", b"x" * 5000, b"[" * 4000 + b"\n"):
        with pytest.raises(HintError):
            decode_plan(message)
        with pytest.raises(HintError):
            decode_cursor(message)
    with pytest.raises(HintError):
        decode_plan(bytes(LONGEST_MESSAGE_BYTES + 1))
    with pytest.raises(HintError):
        decode_cursor(encode_cursor(1) + b"more\n")


def test_too_many_extents_for_a_message_are_refused_where_they_are_written() -> None:
    many = 500_000
    with pytest.raises(HintError, match="use more windows"):
        plan_of(path=[0] * many, start=[0] * many, length=[1] * many, first=[0] * many, span=[0] * many)


def test_a_cursor_is_a_step() -> None:
    assert decode_cursor(encode_cursor(123)) == (123, False)
    assert decode_cursor(encode_cursor(123, by_reads=True)) == (123, True)


def test_jobs_have_plain_names() -> None:
    assert is_job("llama-7b.node_0")
    assert not any(map(is_job, ["", ".hidden", "a/b", "a b", "ü", "x" * 101, "a\n"]))
