"""Answers `fusecache serve` over the control socket: objects by key, listings, and pieces with their descriptor.

`{"command": "object", "key": …}` asks for a version. `{"command": "objects", "prefix": …, …}` asks for a page of a
listing. `{"command": "piece", "key": …, "start": …, "stop": …}` asks for bytes: the answer comes with a descriptor of
the cache file (unix(7), SCM_RIGHTS), once they are there. With `etag` and `size` it is of that version, else of the one
that the mount shows. A negative `start` counts from the end. `doubted`: read the piece from the disk first.
`peer`: another node waits for it, so no third one is asked.

The piece is held until the client closes the connection, at most HOLD_SECONDS.
"""

import base64
import os
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import trio

from fusecache.engine.admin.served_objects import ServedObjects
from fusecache.model.errors import (
    AccessDenied,
    FusecacheError,
    ObjectChanged,
    ObjectMissing,
    Refused,
)
from fusecache.model.objects import Extent, ObjectId

# `fusecache serve` ends a connection that takes no bytes for less long than that.
HOLD_SECONDS = 300.0
_STATUS: dict[type[FusecacheError], int] = {ObjectMissing: 404, ObjectChanged: 412, AccessDenied: 403}
_INVALID, _UNAVAILABLE = 400, 503

# Sends an answer, and a descriptor with it.
Send = Callable[[dict[str, Any], int | None], Awaitable[None]]


async def answer(
    objects: ServedObjects, request: Mapping[str, Any], stream: trio.SocketStream, send: Send
) -> None:
    """Answer one request. An error has the HTTP status that suits it."""
    try:
        match request["command"]:
            case "object":
                found = await objects.find(str(request["key"]))
                await send({"etag": found.etag, "size": found.size, "modified": found.modified}, None)
            case "objects":
                await send(await _page(objects, request), None)
            case _:
                await _piece(objects, request, stream, send)
    except FusecacheError as exc:
        status = next((code for kind, code in _STATUS.items() if isinstance(exc, kind)), _UNAVAILABLE)
        if isinstance(exc, Refused) and exc.status == _INVALID:
            status = _INVALID  # such as a token of another listing
        await send({"result": "error", "message": str(exc), "http": status}, None)


async def _page(objects: ServedObjects, request: Mapping[str, Any]) -> dict[str, Any]:
    page = await objects.list_page(
        str(request["prefix"]),
        delimiter=str(request["delimiter"]),
        token=request["token"],
        start_after=str(request["start_after"]),
        limit=int(request["limit"]),
    )
    rows = [[each.key, each.etag, each.size, each.modified] for each in page.objects]
    return {"objects": rows, "prefixes": page.prefixes, "token": page.next_token}


async def _piece(
    objects: ServedObjects, request: Mapping[str, Any], stream: trio.SocketStream, send: Send
) -> None:
    key, modified, for_peer = str(request["key"]), 0.0, bool(request.get("peer"))
    if "etag" in request and not for_peer:
        object_id, size = ObjectId(key, str(request["etag"])), int(request["size"])
    else:
        found = await objects.find(key)
        object_id, size, modified = found.object_id, found.size, found.modified
        if for_peer and (object_id.etag, size) != (request["etag"], int(request["size"])):
            # A wrong size would also spoil this node's own cache of the version.
            raise ObjectChanged(f"{key}: this node sees another version")
    facts = {"etag": object_id.etag, "size": size, "modified": modified}
    start, stop = int(request["start"]), int(request["stop"])
    start = max(0, size + start) if start < 0 else start
    if start >= min(stop, size):
        await send({**facts, "start": start, "stop": start}, None)
        return
    flags = {"is_doubted": bool(request.get("doubted")), "for_peer": for_peer}
    async with objects.hold(object_id, size, Extent(start, stop), **flags) as piece:
        facts |= {
            "start": piece.extent.start,
            "stop": piece.extent.stop,
            "checksums": base64.b64encode(piece.checksums).decode("ascii"),
        }
        try:
            await send(facts, piece.fd)
        finally:
            os.close(piece.fd)
        with trio.move_on_after(HOLD_SECONDS):
            await stream.receive_some(1)
