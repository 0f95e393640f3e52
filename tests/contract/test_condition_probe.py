"""What a store does with the conditions of writes, true and false ones, is found out by writes of a small object."""

from collections import Counter
from collections.abc import Iterator

import pytest

from fusecache.remote.endpoints import Credentials, Endpoint
from fusecache.remote.s3.store import S3Store
from fusecache.remote.store import ConditionalWrites
from tests.s3server import Fault, FaultAction, S3Server

REQUESTS_MAX = 16
KINDS = [
    ("kept", ConditionalWrites.KEPT),
    ("ignored", ConditionalWrites.IGNORED),
    ("refused", ConditionalWrites.REFUSED),
    ("never-holds", ConditionalWrites.REFUSED),
    ("not-of-parts", ConditionalWrites.NOT_OF_PARTS),
]


@pytest.fixture
def server() -> Iterator[S3Server]:
    """A server of this test's own, whose rules it changes."""
    with S3Server() as made:
        yield made


@pytest.fixture
def store(server: S3Server) -> Iterator[S3Store]:
    """A client of a store that is not R2."""
    endpoint = Endpoint(server.endpoint_url, "auto")
    made = S3Store(server.bucket, endpoint, credentials=Credentials(server.access_key, server.secret_key))
    yield made
    made.close()


@pytest.mark.parametrize(("kind", "found"), KINDS)
def test_each_kind_of_store_is_known_by_few_requests_that_leave_nothing(
    server: S3Server, store: S3Store, kind: str, found: ConditionalWrites
) -> None:
    server.control.set_rules(conditional_writes=kind)
    store.probe_write("mine/")
    assert store.probe_conditions("mine/") is found
    assert len(server.control.log(probes=True)) <= REQUESTS_MAX
    assert (server.control.objects(), server.control.uploads()) == ({}, [])


@pytest.mark.parametrize(("kind", "found"), KINDS)
def test_a_store_that_takes_one_write_a_second_of_a_key_gives_the_same_answer(
    server: S3Server, store: S3Store, kind: str, found: ConditionalWrites
) -> None:
    """As R2 does, here under an address that is not known as R2's."""
    server.control.set_rules(conditional_writes=kind, spares_probes=False)
    store.probe_write("mine/")
    assert store.probe_conditions("mine/") is found
    accepted = Counter(
        entry.key
        for entry in server.control.log(probes=True)
        if entry.status == 200 and entry.operation in ("PutObject", "CompleteMultipartUpload")
    )
    assert max(accepted.values(), default=0) <= 2
    assert (server.control.objects(), server.control.uploads()) == ({}, [])


# Requests of `test_conditions` that the store carries out. REFUSED has those that it refuses for their condition.
CARRIED_OUT = [
    *(("PutObject", number) for number in (1, 2, 5)),
    *(("UploadPart", number) for number in (1, 2)),
    ("CompleteMultipartUpload", 2),
]
REFUSED = [("PutObject", 3), ("PutObject", 4), ("CompleteMultipartUpload", 1)]


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("action", [FaultAction.ANSWER_AFTER, FaultAction.DROP_AFTER])
def test_an_upload_whose_answer_is_lost_does_not_stay(
    server: S3Server, store: S3Store, number: int, action: FaultAction
) -> None:
    """Also if the request is repeated, and begins another one."""
    store.probe_write("mine/")
    server.control.faults(
        Fault(action, operation="CreateMultipartUpload", nth=number, status=403, code="AccessDenied")
    )
    store.probe_conditions("mine/")
    assert len(server.control.log("CreateMultipartUpload", probes=True)) >= number
    assert (server.control.objects(), server.control.uploads()) == ({}, [])


def test_an_upload_that_a_killed_daemon_left_behind_is_aborted_by_a_later_one(
    server: S3Server, store: S3Store
) -> None:
    """Not one that another node has just begun, nor uploads of other programs."""
    for key in ("mine/.fusecache-probe-old-2", "mine/checkpoint"):
        store.create_multipart(key, metadata={})
    server.control.advance_clock(-2 * 3600)
    store.create_multipart("mine/.fusecache-probe-older-2", metadata={})
    server.control.advance_clock(2 * 3600)
    store.probe_conditions("mine/")
    left = [each.key for each in server.control.uploads()]
    assert sorted(left) == ["mine/.fusecache-probe-old-2", "mine/checkpoint"]


@pytest.mark.parametrize(("operation", "number"), CARRIED_OUT)
def test_a_write_whose_answer_is_lost_says_nothing_else_of_the_store(
    server: S3Server, store: S3Store, operation: str, number: int
) -> None:
    """The request is repeated, and refused then, as its condition is not true any more."""
    store.probe_write("mine/")
    server.control.faults(Fault(FaultAction.DROP_AFTER, operation=operation, nth=number, times=1))
    assert store.probe_conditions("mine/") is ConditionalWrites.KEPT
    assert (server.control.objects(), server.control.uploads()) == ({}, [])


@pytest.mark.parametrize(
    ("operation", "number", "action"),
    [
        *((*each, FaultAction.ANSWER_AFTER) for each in CARRIED_OUT),
        *((*each, FaultAction.ANSWER) for each in (*CARRIED_OUT, *REFUSED, ("CreateMultipartUpload", 2))),
    ],
)
def test_a_request_that_fails_in_the_middle_leaves_nothing(
    server: S3Server, store: S3Store, operation: str, number: int, action: FaultAction
) -> None:
    """Whether the store had carried it out or not."""
    store.probe_write("mine/")
    server.control.faults(Fault(action, operation=operation, nth=number, status=403, code="AccessDenied"))
    assert store.probe_conditions("mine/") is ConditionalWrites.UNKNOWN
    assert (server.control.objects(), server.control.uploads()) == ({}, [])


def test_r2_is_not_tested_as_its_conditions_are_documented(server: S3Server) -> None:
    endpoint = Endpoint(server.endpoint_url, "auto", is_r2=True)
    store = S3Store(server.bucket, endpoint, credentials=Credentials(server.access_key, server.secret_key))
    assert store.probe_conditions("") is ConditionalWrites.KEPT
    assert server.control.log(probes=True) == []
    store.close()
