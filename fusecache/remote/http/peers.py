"""Asks other nodes for pieces of objects, which their `fusecache serve` sends. A peer is one more place with the bytes.

Bytes of a peer count only if the ETag, the length and every granule's checksum are right. A peer that fails, refuses
or is slow rests for a while, and the bucket is asked. Thread-safe; `get_into` blocks.

A peer asks no third node: by the key of the signature it knows that a node asks.
"""

import threading
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any

from fusecache.model.errors import RemoteError, Unavailable
from fusecache.model.objects import MIB, Extent, ObjectId
from fusecache.policy.peer_choice import choose_owner
from fusecache.remote.endpoints import Transport
from fusecache.remote.http.peer_get import Checksums, TooSlow, ask_peer
from fusecache.remote.http.ranged_get import Carry, GetRequest, PeerTerms, ReceiverEnded
from fusecache.remote.http.signed_requests import HttpRequest, SignedHttp, Site, query_of
from fusecache.remote.protocol.headers import MOUNT_HEADER, SIZE_HEADER, quoted_etag
from fusecache.remote.protocol.responses import parse_listing
from fusecache.remote.protocol.signing import PEER_KEY, SigningKeys, sign_by_v4
from fusecache.remote.store import Interruption, Peers

# A live peer sends a sign of life twice a second while it fetches what it lacks.
SILENCE_SECONDS = 3.0
CONNECT_SECONDS = 1.0
# A body slower than this is given up, or than half the rate of the bucket's bodies if that is lower. A peer has all of
# a body in memory before it sends the head.
SLOWEST_BYTES_PER_SECOND = 4 * MIB
# If one body was too slow, others are given up that come since so long, and this many times slower than the slowest.
_ENDED_SECONDS, _FAR = 0.25, 4
# Smaller bodies of the bucket say little about its rate. Each of the others counts for an eighth.
_RATED_BYTES, _RATE_SHARE = MIB, 8
# How long a peer rests after a failure; twice as long after each further one. A refusal says that it has much to do.
_REST_SECONDS, _LONGEST_REST_SECONDS, _REFUSED_REST_SECONDS = 15.0, 600.0, 0.5
_MOST_DOUBLINGS = 16  # beyond the longest rest; the power of a node that is dead for days would fit no float
# Of a test: the node asks the bucket first.
_TEST_SECONDS, TEST_OBJECTS, _TEST_BYTES = 10.0, 100, 8 * MIB
# It has much to do; or the bucket does not have the version any more.
_REFUSALS = (503, 404, 412)


@dataclass(slots=True, eq=False)
class _RunningGet:
    """One GET. asked_at, began_at: by the monotonic clock; began_at: when its body began to come."""

    interruption: Interruption
    progress: Callable[[int], None]
    asked_at: float
    began_at: float = float("inf")
    received: int = 0

    def count(self, received: int) -> None:
        """So many bytes of the body have come."""
        if self.began_at == float("inf"):
            self.began_at = time.monotonic()
        self.received = received
        self.progress(received)


@dataclass(slots=True)
class _PeerNode:
    """One node. failures: in a row; failed_at, rests_until: by the monotonic clock; error: the last one."""

    http: SignedHttp
    running: set[_RunningGet] = field(default_factory=set)
    received_bytes: int = 0
    received_pieces: int = 0
    requests: int = 0
    refusals: int = 0
    failed: int = 0
    failures: int = 0
    failed_at: float = 0.0
    rests_until: float = 0.0
    error: str = ""


@dataclass(frozen=True, slots=True)
class PeerAnswer:
    """How a node answered a test: a listing, then bytes of an object of it, in so many seconds; "" if it has none."""

    list_seconds: float
    key: str = ""
    nbytes: int = 0
    seconds: float = 0.0


def cause_of(error: RemoteError) -> str:
    """Return what a node answered, without the remedy for an answer of the bucket."""
    return str(error).removesuffix(f"; {error.remedy}")


class PeerNodes(Peers):
    """The nodes of one bucket."""

    def __init__(
        self, bucket: str, secret: str, checksums: Checksums, mount: str = "", carry: Carry | None = None
    ) -> None:
        """secret: of all nodes. mount: its `mount_digest`. carry: may have another process ask."""
        self._bucket = bucket
        self._mount = mount
        self._secret = secret
        self._checksums = checksums
        self._carry = carry
        self._lock = threading.Lock()
        self._bucket_rate = 2.0 * SLOWEST_BYTES_PER_SECOND
        self._peers: dict[str, _PeerNode] = {}
        # The nodes, this one among them, and which of them this one is: one value, as threads read it.
        self._view: tuple[tuple[str, ...], str] = (), ""
        # Why the list could not be read the last time; "" if it could.
        self.list_error = ""

    def set_nodes(self, nodes: tuple[str, ...], own: str) -> None:
        """The list of nodes is another one. own: this node's address; "" if it is not in the list."""
        with self._lock:
            for gone in self._peers.keys() - nodes:
                self._peers.pop(gone).http.close()
            for node in nodes:
                if node != own and node not in self._peers:
                    self._peers[node] = _PeerNode(self._http(node))
            self._peers.pop(own, None)
            self._view = nodes, own

    def owner(self, object_id: ObjectId, group: int) -> str | None:
        """Return the node to ask for a group, among the nodes that are not resting. None: the bucket."""
        nodes, own = self._view
        now = time.monotonic()
        resting = frozenset(name for name, peer in self._peers.items() if peer.rests_until > now)
        awake = _without(nodes, resting) if resting else nodes
        if not awake:
            return None
        owner = choose_owner(awake, object_id.key, object_id.etag, group)
        if owner == own:
            return None
        with self._lock:
            peer = self._peers.get(owner)
            if peer is not None and peer.failures:
                # One request shows whether a peer that has rested is well. Until then it goes on resting.
                peer.rests_until = now + _REST_SECONDS
        return owner

    def is_own(self, object_id: ObjectId, group: int) -> bool:
        """Return whether this node keeps a group for the others; all of them if it is not in the list."""
        nodes, own = self._view
        return not own or choose_owner(nodes, object_id.key, object_id.etag, group) == own

    def on_bucket_body(self, nbytes: int, seconds: float) -> None:
        """The bucket has sent a body in so much time: peers are compared with that."""
        if nbytes >= _RATED_BYTES:
            self._bucket_rate += (nbytes / max(seconds, 1e-3) - self._bucket_rate) / _RATE_SHARE

    def get_into(
        self,
        node: str,
        object_id: ObjectId,
        size: int,
        extent: Extent,
        buffer: memoryview,
        progress: Callable[[int], None],
        interruption: Interruption,
    ) -> None:
        """Fill the buffer from a node; `progress` counts checked bytes. Raises RemoteError: then ask the bucket."""
        peer = self._peers.get(node)
        what = f"GET {object_id.key} from peer {node}"
        if peer is None:
            raise Unavailable(f"{what}: it has left")
        peer.requests += 1
        running = _RunningGet(interruption, progress, time.monotonic())
        slowest = min(SLOWEST_BYTES_PER_SECOND, self._bucket_rate / 2)
        terms = PeerTerms(size, slowest)
        get = GetRequest.into(buffer, what, object_id, extent, running.count, interruption, terms)
        with self._lock:
            peer.running.add(running)
        try:
            self._exchange(peer.http, get, size)
        except RemoteError as exc:
            if not interruption.is_asked and not isinstance(exc, ReceiverEnded):
                self._rest(peer, exc, running.asked_at)
                if isinstance(exc, TooSlow):
                    self._end_slow(peer, slowest)
            raise
        finally:
            with self._lock:
                peer.running.discard(running)
        with self._lock:
            peer.received_bytes += extent.size
            peer.received_pieces += 1
            if running.asked_at > peer.failed_at:
                peer.failures, peer.rests_until = 0, 0.0

    def test(self, node: str, prefix: str) -> PeerAnswer:
        """Have a node's daemon list some objects, and send bytes of the largest of them twice.

        The second time it has them: that is the rate. Raises RemoteError, also if it refuses the key or the clock.
        """
        what = f"LIST from peer {node}"
        query = query_of(
            {"list-type": "2", "max-keys": str(TEST_OBJECTS), "encoding-type": "url", "prefix": prefix}
        )
        with closing(self._http(node, _TEST_SECONDS)) as http:
            began = time.monotonic()
            try:
                objects = parse_listing(http.call(what, "GET", None, query=query).body).objects
            except ValueError as exc:
                raise Unavailable(f"{what}: {exc}") from exc
            listed = time.monotonic() - began
            found = max(objects, key=lambda each: each.size, default=None)
            if found is None or not found.size:
                return PeerAnswer(listed)
            extent = Extent(0, min(found.size, _TEST_BYTES))
            buffer = memoryview(bytearray(extent.size))
            what, terms = f"GET {found.key} from peer {node}", PeerTerms(found.size, 0.0)
            get = GetRequest.into(
                buffer, what, found.object_id, extent, lambda _: None, Interruption(), terms
            )
            for _ in range(2):
                began = time.monotonic()
                self._exchange(http, get, found.size)
            return PeerAnswer(listed, found.key, extent.size, time.monotonic() - began)

    def _exchange(self, http: SignedHttp, get: GetRequest, size: int) -> None:
        asked = {
            "if-match": quoted_etag(get.object_id.etag),
            "range": f"bytes={get.extent.start}-{get.extent.stop - 1}",
            SIZE_HEADER: str(size),
        }
        request = HttpRequest(get.what, "GET", get.object_id.key, asked)
        carry = partial(http.carry, get) if http.carry is not None else None
        http.exchange(request, partial(ask_peer, get, self._checksums), carry)

    def statistics(self) -> dict[str, Any]:
        """Return PEER_FACTS as plain values."""
        nodes, own = self._view
        now = time.monotonic()
        peers = dict(self._peers)
        return {
            "own_address": own,
            "nodes": len(nodes),
            "list_error": self.list_error,
            "received_bytes": {name: peer.received_bytes for name, peer in peers.items()},
            "received_pieces": {name: peer.received_pieces for name, peer in peers.items()},
            "requests": {name: peer.requests for name, peer in peers.items()},
            "refusals": {name: peer.refusals for name, peer in peers.items()},
            "failures": {name: peer.failed for name, peer in peers.items()},
            "resting": {name: peer.error for name, peer in peers.items() if peer.rests_until > now},
            "failing": sum(bool(peer.failures) and peer.rests_until > now for peer in peers.values()),
        }

    def close(self) -> None:
        """Close idle connections."""
        for peer in self._peers.values():
            peer.http.close()

    def _http(self, node: str, silence_seconds: float = SILENCE_SECONDS) -> SignedHttp:
        keys = SigningKeys(PEER_KEY, self._secret)
        site = Site(f"http://{node}", f"/{self._bucket}/", sign_by_v4("us-east-1", lambda: keys))
        transport = Transport(
            connect_timeout_seconds=CONNECT_SECONDS,
            read_timeout_seconds=silence_seconds,
            attempts=1,
            is_direct=True,
            carry=self._carry,
        )
        own = {MOUNT_HEADER: self._mount} if self._mount else {}
        return SignedHttp(site, transport, options=lambda _: own)

    def _end_slow(self, peer: _PeerNode, slowest: float) -> None:
        """One body of a node was too slow: end others with less than a fourth of that rate, if asked before that.

        The rest may be fast enough without them.
        """
        now = time.monotonic()
        with self._lock:
            running = [each for each in peer.running if each.asked_at < peer.failed_at]
        for each in running:
            seconds = now - each.began_at
            if seconds > _ENDED_SECONDS and each.received < seconds * slowest / _FAR:
                each.interruption.interrupt()

    def _rest(self, peer: _PeerNode, error: RemoteError, asked_at: float) -> None:
        now = time.monotonic()
        with self._lock:
            peer.error = cause_of(error)
            # A refusal after a long wait costs readers as much as a failure.
            is_late = error.status == 503 and now > asked_at + SILENCE_SECONDS
            if error.status in _REFUSALS and not is_late:
                peer.refusals += 1
                peer.rests_until = max(peer.rests_until, now + _REFUSED_REST_SECONDS)
                return
            peer.failed += 1
            if asked_at > peer.failed_at:  # else it was asked before the failure that counts
                peer.failures += 1
                peer.failed_at = now
                doublings = min(peer.failures - 1, _MOST_DOUBLINGS)
                peer.rests_until = now + min(_REST_SECONDS * 2**doublings, _LONGEST_REST_SECONDS)


# `choose_owner` remembers the list with each group: it must be one list, not one for each.
@lru_cache(64)
def _without(nodes: tuple[str, ...], resting: frozenset[str]) -> tuple[str, ...]:
    return tuple(node for node in nodes if node not in resting)
