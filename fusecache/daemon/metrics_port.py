"""Answers Prometheus on a port of 127.0.0.1, in threads of prometheus-client. The option `metrics_port`."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import trio

from fusecache.model.errors import MountError
from fusecache.mount.metrics import StatusCollector

ADDRESS = "127.0.0.1"


@contextmanager
def metrics_served(port: int | None, read_status: Callable[[], Mapping[str, Any]]) -> Iterator[None]:
    """Serve while the body runs; port None: nowhere. Raises MountError if the port cannot be used.

    read_status: returns the status of now; called on the loop of the caller.
    """
    if port is None:
        yield
        return
    from prometheus_client import CollectorRegistry, start_http_server

    token = trio.lowlevel.current_trio_token()
    registry = CollectorRegistry()
    registry.register(StatusCollector(lambda: trio.from_thread.run_sync(read_status, trio_token=token)))
    try:
        server, thread = start_http_server(port, addr=ADDRESS, registry=registry)
    except OSError as exc:
        raise MountError(
            f"{ADDRESS}:{port} cannot be used for metrics: {exc.strerror}; choose another --metrics-port"
        ) from exc
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
