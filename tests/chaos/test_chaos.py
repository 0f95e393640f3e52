"""The run itself: its plan comes from the seed alone, its checks find what they look for, and short runs are clean."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos.checks import Markers, compare
from tests.chaos.contents import Content, bytes_of, is_expected
from tests.chaos.load import Ledger, Load
from tests.chaos.plan import ANSWERS, COPY, NODE, PERIOD_SECONDS, REST_SECONDS, WAYS, WHOLE_MACHINE, draw_plan
from tests.chaos.programs import RUNS
from tests.s3server import ServerProcess
from tests.support.mounts import tree_of, wait_until

OLD: Content = [[1, 1000]]
NEW: Content = [[2, 3000], "end"]
MARKER = '{"runs/trainer-0/step-1/shard-0": [[3, 500]]}'


@pytest.fixture
def server() -> Iterator[ServerProcess]:
    with ServerProcess() as started:
        yield started


def test_a_seed_gives_one_plan() -> None:
    """The same seed draws the same faults, and another seed draws others."""
    assert draw_plan(1, 30, whole_machine=True) == draw_plan(1, 30, whole_machine=True)
    assert draw_plan(1, 30, whole_machine=True) != draw_plan(2, 30, whole_machine=True)


def test_half_an_hour_has_every_kind() -> None:
    """No kind is left out of a run of the default length."""
    plan = draw_plan(1, 30, whole_machine=True)
    drawn = {fault.kind for faults in plan.lanes.values() for fault in faults}
    assert drawn == {*ANSWERS, *WAYS, *NODE, *WHOLE_MACHINE, "writer killed"}


def test_a_kept_mount_loses_its_daemon_again_and_again() -> None:
    """Its kills are a lane of their own, and the other faults go on meanwhile."""
    lanes = draw_plan(1, 30, whole_machine=True, is_kept=True).lanes
    assert len(lanes["kills"]) > 40
    assert {fault.kind for fault in lanes["kills"]} == {"daemon killed"}
    assert {fault.kind for fault in lanes["node"]} == {*NODE, *WHOLE_MACHINE} - {"daemon killed"}


def test_servers_take_turns_from_rest_to_rest() -> None:
    """No fault of one server is in force while another's is, and a copy has a fault of its own."""
    plan = draw_plan(1, 30, whole_machine=True, has_copy=True)
    faults = [*plan.lanes["answers"], *plan.lanes["ways"]]
    assert {fault.kind for fault in faults} == {*ANSWERS, *WAYS, *COPY}
    for server in (0, 1):
        for fault in (each for each in faults if plan.server_of(each) == server):
            for other in (each for each in faults if plan.server_of(each) != server):
                assert not fault.start <= other.start <= fault.start + fault.seconds


def test_lanes_rest_before_each_look() -> None:
    """No fault is in force while the run checks that all has healed."""
    plan = draw_plan(5, 30, whole_machine=True)
    assert plan.rests[0] == PERIOD_SECONDS
    for faults in plan.lanes.values():
        for fault in faults:
            assert not any(
                fault.start < end and fault.start + fault.seconds > end - REST_SECONDS for end in plan.rests
            )


@pytest.mark.parametrize(
    ("in_bucket", "found"),
    [
        (bytes_of(NEW), ""),
        (None, "lost"),
        (bytes_of(OLD), "wrong bytes"),
        (bytes_of(NEW)[:-1], "wrong bytes"),
    ],
)
def test_an_acknowledged_close_is_compared(
    server: ServerProcess, in_bucket: bytes | None, found: str
) -> None:
    """What the bucket lacks is lost, and everything but the last content is wrong."""
    ledger = Ledger()
    ledger.did({"runs/trainer-0/a": OLD}, "write", 0)
    ledger.did({"runs/trainer-0/a": NEW}, "write", 0)
    if in_bucket is not None:
        server.control.put("runs/trainer-0/a", in_bucket)
    wrong = compare(server, ledger)
    assert [text.partition(":")[0] for text in wrong.values()] == ([found] if found else [])


@pytest.mark.parametrize(
    ("in_bucket", "is_wrong"),
    [(bytes_of(OLD), False), (bytes_of(NEW), False), (None, True), (bytes_of(NEW)[:100], True)],
)
def test_a_failed_close_leaves_old_or_new(
    server: ServerProcess, in_bucket: bytes | None, *, is_wrong: bool
) -> None:
    """A call without an answer may have had its effect, whole or not at all."""
    ledger = Ledger()
    ledger.did({"runs/trainer-0/a": OLD}, "write", 0)
    ledger.may_have({"runs/trainer-0/a": NEW}, 1.0)
    if in_bucket is not None:
        server.control.put("runs/trainer-0/a", in_bucket)
    assert bool(compare(server, ledger)) == is_wrong


def test_foreign_files_and_remains_are_found(server: ServerProcess) -> None:
    """A name that no program wrote, and a file that was removed here, are findings."""
    ledger = Ledger()
    ledger.did({"runs/trainer-0/a": None}, "unlink", 0)
    server.control.put("runs/trainer-0/a", b"old")
    server.control.put("runs/trainer-0/a.conflict-node-1", b"new")
    wrong = compare(server, ledger)
    assert wrong["runs/trainer-0/a"].startswith("unhealed")
    assert wrong["runs/trainer-0/a.conflict-node-1"].startswith("wrong bytes")


def test_an_index_without_its_files_is_found(server: ServerProcess, tmp_path: Path) -> None:
    """An index needs all its files, in their sizes, and `latest` needs the index."""
    found: list[str] = []
    markers = Markers(server, Ledger(), tmp_path, lambda kind, _: found.append(kind))
    server.control.put("runs/trainer-0/step-1/shard-0", bytes_of([[3, 500]]))
    server.control.put("runs/trainer-0/step-1/.metadata", MARKER.encode())
    server.control.put("runs/trainer-0/latest", b"step-1")
    markers.look()
    assert found == []
    server.control.put("runs/trainer-0/step-1/shard-0", b"short")
    markers.look()
    assert found == ["order"]
    server.control.delete("runs/trainer-0/step-1/shard-0")
    markers.look()
    assert found == ["order"] * 2
    server.control.delete("runs/trainer-0/step-1/.metadata")
    markers.look()
    assert found == ["order"] * 3


def unlike(root: Path, ledger: Ledger) -> list[str]:
    """Return the names whose content the ledger does not allow."""
    there = {path: data for path, data in tree_of(root).items() if data is not None}
    allowed = {path: contents for path, (contents, _) in ledger.snapshot().items()}
    return [
        path
        for path in there.keys() | allowed.keys()
        if not is_expected(there.get(path), allowed.get(path, []))
    ]


def test_files_stay_open_while_their_names_move(tmp_path: Path) -> None:
    """On a plain directory nothing is found, and the ledger knows each file in the end, whenever that is."""
    found: list[str] = []
    (tmp_path / RUNS).mkdir()
    load = Load(tmp_path, 1, lambda kind, text: found.append(f"{kind}: {text}"), lambda *_: False)
    load.start(["mover"] * 6)
    wait_until(lambda: load.ledger.calls["rename"] > 40 and load.ledger.calls["unlink"] > 5, "many steps", 60)
    load.stop(10)
    assert not found
    assert not unlike(tmp_path, load.ledger)
    assert load.ledger.certain() > 10


def test_bytes_and_names_of_another_file_are_found(tmp_path: Path) -> None:
    """What lands in a file under a name that it has lost is seen by the program that has it open."""
    found: list[str] = []
    (tmp_path / RUNS).mkdir()
    load = Load(tmp_path, 1, lambda _, text: found.append(text), lambda *_: False)
    load.start(["mover"])

    def harm() -> bool:
        for path in tmp_path.rglob("*"):
            if path.is_file():
                path.write_bytes(b"of another file")
                path.with_name("another").write_bytes(b"")
        return any("names" in text for text in found) and any("descriptor" in text for text in found)

    wait_until(harm, "both findings", 60)
    load.stop(10)


def test_a_step_that_failed_leaves_its_files_uncertain(tmp_path: Path) -> None:
    """Each name may be gone or hold what any of the step's files was to hold, and nothing else."""
    (tmp_path / RUNS).mkdir()
    load = Load(tmp_path, 1, lambda *_: None, lambda *_: True)
    load.start(["mover"])

    def fail() -> bool:
        for path in (tmp_path / RUNS).iterdir():
            shutil.rmtree(path, ignore_errors=True)
        return load.ledger.errors["ENOENT"] > 3

    wait_until(fail, "failed steps", 60)
    load.stop(10)
    assert not unlike(tmp_path, load.ledger)
