"""Stores of Google Cloud Storage and Azure on servers of this machine: Google's as a fake, Azure's as Azurite."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from fusecache.remote.clouds.azure import AzureStore
from fusecache.remote.clouds.gcs import GcsStore
from fusecache.remote.clouds.opening import open_cloud_store
from fusecache.remote.endpoints import Transport, choose_endpoint
from tests.support.azurite import PROGRAM, Azurite
from tests.support.gcs_server import GcsServer

CONTAINER = "container"


def azure_variables(server: Azurite) -> dict[str, str]:
    """Return the environment variables of a client of Azurite."""
    return {"AZURE_STORAGE_ACCOUNT_NAME": server.account, "AZURE_STORAGE_ACCOUNT_KEY": server.key}


def azure_store(
    server: Azurite, environment: Mapping[str, str] | None = None, transport: Transport | None = None
) -> AzureStore:
    """Return a store on Azurite."""
    environment = environment or azure_variables(server)
    endpoint = choose_endpoint(environment, source=f"az://{CONTAINER}", endpoint_url=server.endpoint_url)
    store = open_cloud_store(CONTAINER, endpoint, environment, transport=transport or Transport())
    assert isinstance(store, AzureStore)
    return store


@contextmanager
def running_azurite(certificate: Path | None = None) -> Iterator[Azurite]:
    """Run Azurite with the container of the tests, which stores never create. certificate: as for `Azurite`.

    Skips the test if Azurite is not installed; fails it in `make test-stores`, which has installed it.
    """
    if not PROGRAM.exists() and not os.environ.get("FUSECACHE_TEST_STORES"):
        pytest.skip("Azurite is not installed; `make test-stores` does it")
    with Azurite(certificate) as server:
        store = azure_store(server)
        store._http.call("CREATE", "PUT", query="restype=container")
        store.close()
        yield server


def gcs_store(server: GcsServer, transport: Transport | None = None) -> GcsStore:
    """Return a store on the fake; its tokens come from there too, if GOOGLE_APPLICATION_CREDENTIALS says so."""
    endpoint = choose_endpoint({}, source=f"gs://{server.bucket}", endpoint_url=server.endpoint_url)
    store = open_cloud_store(server.bucket, endpoint, {}, transport=transport or Transport())
    assert isinstance(store, GcsStore)
    return store
