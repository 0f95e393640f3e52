"""What only Google Cloud Storage and Azure have: tokens, signatures, generations, blocks, namespaces."""

import base64
import gzip
import json
import os
import re
import ssl
import sys
import threading
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from fusecache.installation import extra_command
from fusecache.model.errors import (
    AccessDenied,
    BucketMissing,
    ConfigError,
    CredentialsMissing,
    FusecacheError,
    ObjectChanged,
    PartsRefused,
    Refused,
    Unavailable,
    Untrusted,
    UploadLost,
)
from fusecache.model.objects import Extent, ObjectId
from fusecache.remote.clouds.azure import AzureStore
from fusecache.remote.clouds.gcs import GcsStore
from fusecache.remote.clouds.opening import open_cloud_store
from fusecache.remote.endpoints import Endpoint, StoreKind, Transport, choose_endpoint
from fusecache.remote.store import Condition, ConditionalWrites, FileSlice
from tests.contract.conftest import closed_later
from tests.support.azurite import Azurite
from tests.support.clouds import (
    CONTAINER,
    azure_store,
    azure_variables,
    gcs_store,
    running_azurite,
)
from tests.support.gcs_server import GcsServer
from tests.support.peer import MakePeer

MakeBody = Callable[[bytes], FileSlice]
PLAIN = pytest.mark.parametrize("peer", ["plain"], indirect=True)


@pytest.fixture
def gcs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[GcsServer]:
    """A fake of Google Cloud Storage of this test's own."""
    with GcsServer() as server:
        monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(server.key_file(tmp_path / "key.json")))
        yield server


def gs(server: GcsServer) -> GcsStore:
    """A store on the fake that is closed at the end of the test."""
    return closed_later(gcs_store(server))


# ---- Google


def test_a_renewed_key_file_heals_refused_tokens(gcs: GcsServer, body: MakeBody, tmp_path: Path) -> None:
    store = gs(gcs)
    store.put("a", body(b"1"), metadata={})
    gcs.allowed.clear()
    with pytest.raises(AccessDenied, match=r"HEAD gs://bucket/a: 401"):
        store.head("a")
    gcs.key_file(tmp_path / "key.json")
    store.reload()
    assert store.head("a").size == 1


def test_one_token_serves_many_requests(gcs: GcsServer, body: MakeBody) -> None:
    store = gs(gcs)
    for name in "abc":
        store.put(name, body(b"1"), metadata={})
    assert [each.split("?")[0] for each in gcs.requests] == [
        "POST /token",
        "PUT /bucket/a",
        "PUT /bucket/b",
        "PUT /bucket/c",
    ]


def test_missing_google_credentials_name_the_way(
    gcs: GcsServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "none.json"))
    with pytest.raises(
        CredentialsMissing,
        match=r"LIST gs://bucket/: File .*none\.json.*GOOGLE_APPLICATION_CREDENTIALS, or run `gcloud",
    ):
        gs(gcs).list_page("")


def test_a_key_that_xml_cannot_hold_is_listed(gcs: GcsServer) -> None:
    gcs.put("odd \x01+name", b"1")
    gcs.put("dir/+x", b"1")
    page = gs(gcs).list_page("", delimiter="/")
    assert ([each.key for each in page.objects], page.prefixes) == (["odd \x01+name"], ("dir/",))


def test_a_replaced_generation_is_a_change(gcs: GcsServer, body: MakeBody) -> None:
    """The ETag is an MD5 there: the same bytes again are the same version."""
    store = gs(gcs)
    etag = store.put("a", body(b"same"), metadata={})
    before = gcs.objects["a"].generation
    gcs.put("a", b"same")
    assert gcs.objects["a"].generation > before
    store.put("a", body(b"new"), metadata={}, condition=Condition(etag))
    with pytest.raises(ObjectChanged, match=r"gs://bucket/a: expected [0-9a-f]+, found"):
        store.put("a", body(b"newer"), metadata={}, condition=Condition(etag))


def test_a_copy_keeps_the_headers_of_its_source(gcs: GcsServer) -> None:
    item = gcs.put("a", b"x", {"content-type": "text/plain", "x-goog-meta-note": "1"})
    store = gs(gcs)
    found = store.head("a")
    store.copy(found.object_id, "b", metadata={**found.carried, "note": "2"})
    assert item.headers["content-type"] == gcs.objects["b"].headers["content-type"]
    assert gcs.objects["b"].headers["x-goog-meta-note"] == "2"


@pytest.mark.case(46)
def test_bytes_that_google_unpacked_are_never_taken(gcs: GcsServer) -> None:
    data = gzip.compress(bytes(1000))
    gcs.put("packed", data, {"content-encoding": "gzip"})
    store = gs(gcs)
    found = store.head("packed")
    assert found.size == len(data)
    for extent in (Extent(0, len(data)), Extent(1, 5)):
        with pytest.raises(Unavailable):
            store.get_into(found.object_id, extent, memoryview(bytearray(extent.size)), lambda _: None)


def test_ignored_conditions_are_found_out(gcs: GcsServer) -> None:
    store = gs(gcs)
    assert store.probe_conditions("") is ConditionalWrites.NOT_OF_PARTS
    gcs.ignores_conditions = True
    assert store.probe_conditions("") is ConditionalWrites.IGNORED
    assert gcs.objects == {}


def test_a_refused_probe_says_so(gcs: GcsServer) -> None:
    gcs.refuses_writes = True
    with pytest.raises(AccessDenied):
        gs(gcs).probe_write("below/")


def test_an_unknown_certificate_is_not_trusted(
    certificate: tuple[Path, ssl.SSLContext], monkeypatch: pytest.MonkeyPatch, body: MakeBody
) -> None:
    path, context = certificate
    with GcsServer(context) as server:
        server.allowed.add("")  # as requests without a token count here
        endpoint = choose_endpoint({}, source="gs://bucket", endpoint_url=server.endpoint_url)
        open_it = lambda: closed_later(  # noqa: E731
            open_cloud_store("bucket", endpoint, {}, transport=Transport(), is_unsigned=True)
        )
        with pytest.raises(Untrusted, match="SSL_CERT_FILE"):
            open_it().head("a")
        monkeypatch.setenv("SSL_CERT_FILE", str(path))
        open_it().put("a", body(b"1"), metadata={})


@pytest.mark.parametrize(
    ("source", "module", "extra"),
    [("gs://b", "google.auth", "gcs"), ("az://b", "azure.identity", "azure")],
)
def test_a_missing_library_names_its_extra(
    source: str, module: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    endpoint = choose_endpoint({"AZURE_STORAGE_ACCOUNT": "account"}, source=source)
    with pytest.raises(ConfigError, match=re.escape(extra_command(extra))):
        open_cloud_store("b", endpoint, {}, transport=Transport())


# ---- Azure


def test_a_shared_access_signature_is_enough(azurite: Azurite, body: MakeBody) -> None:
    blob = pytest.importorskip("azure.storage.blob")
    signature = blob.generate_container_sas(
        azurite.account,
        CONTAINER,
        azurite.key,
        permission=blob.ContainerSasPermissions(read=True, write=True, delete=True, list=True, create=True),
        expiry=datetime.now() + timedelta(days=2),
    )
    environment = {"AZURE_STORAGE_ACCOUNT": azurite.account, "AZURE_STORAGE_SAS_TOKEN": f"?{signature}"}
    store = closed_later(azure_store(azurite, environment))
    store.put("sas/a b", body(b"1"), metadata={"note": "x"})
    [item] = store.list_page("sas/").objects
    store.copy(item.object_id, "sas/c")
    upload = store.create_multipart("sas/d", metadata={})
    store.complete_multipart("sas/d", upload, [store.upload_part("sas/d", upload, 1, body(b"part"))])
    assert [each.size for each in store.list_page("sas/").objects] == [1, 1, 4]
    store.delete("sas/c")
    with pytest.raises(FusecacheError) as caught:
        store.head("sas/none")
    assert "sig=" not in str(caught.value)


class _Identity(BaseHTTPRequestHandler):
    """The endpoint that gives programs on a machine of Azure their tokens (App Service's managed identity)."""

    def do_GET(self) -> None:
        """Answer with an unsigned token."""
        claims = {
            "aud": "https://storage.azure.com",
            "iss": "https://sts.windows.net/1/",
            "iat": 0,
            "nbf": 0,
            "exp": 2**31,
        }
        parts = ({"alg": "none"}, claims, {})
        token = ".".join(
            base64.urlsafe_b64encode(json.dumps(each).encode()).decode().rstrip("=") for each in parts
        )
        assert self.headers["X-IDENTITY-HEADER"] == "secret"
        body = json.dumps({"access_token": token, "expires_on": str(2**31), "token_type": "Bearer"}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Stay silent."""


def test_a_managed_identity_needs_no_key(
    certificate: tuple[Path, ssl.SSLContext], monkeypatch: pytest.MonkeyPatch, body: MakeBody
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate[0]))
    identity = ThreadingHTTPServer(("127.0.0.1", 0), _Identity)
    thread = threading.Thread(target=identity.serve_forever, args=(0.05,))
    thread.start()
    monkeypatch.setenv("IDENTITY_ENDPOINT", f"http://127.0.0.1:{identity.server_address[1]}/token")
    monkeypatch.setenv("IDENTITY_HEADER", "secret")
    try:
        with running_azurite(certificate[0]) as server:
            store = azure_store(server, {"AZURE_STORAGE_ACCOUNT_NAME": server.account})
            store.put("a", body(b"bytes"), metadata={})
            assert store.head("a").size == 5
            store.close()
    finally:
        identity.shutdown()
        identity.server_close()
        thread.join(10)


def test_a_wrong_key_is_a_refusal(azurite: Azurite) -> None:
    environment = azure_variables(azurite) | {
        "AZURE_STORAGE_ACCOUNT_KEY": base64.b64encode(bytes(64)).decode()
    }
    with pytest.raises(AccessDenied, match=r"LIST az://container/: .*check the credentials"):
        closed_later(azure_store(azurite, environment)).list_page("")
    with pytest.raises(ConfigError, match="AZURE_STORAGE_ACCOUNT_KEY is no key"):
        azure_store(azurite, azure_variables(azurite) | {"AZURE_STORAGE_ACCOUNT_KEY": "no base64"})


def test_a_missing_container_is_named(azurite: Azurite) -> None:
    environment = azure_variables(azurite)
    endpoint = choose_endpoint(environment, source="az://nothing", endpoint_url=azurite.endpoint_url)
    store = closed_later(open_cloud_store("nothing", endpoint, environment, transport=Transport()))
    with pytest.raises(BucketMissing, match="check the bucket's name"):
        store.list_page("")
    with pytest.raises(BucketMissing):
        store.probe_write("")


def test_pages_remember_where_the_listing_starts(azurite: Azurite, body: MakeBody) -> None:
    store = closed_later(azure_store(azurite))
    for name in ("1", "2", "3/x", "4", "5"):
        store.put(f"pages/{name}", body(b"1"), metadata={})
    found: list[str] = []
    token = None
    for _ in range(10):
        page = store.list_page("pages/", delimiter="/", token=token, start_after="pages/2", limit=1)
        found += [each.key for each in page.objects] + list(page.prefixes)
        token = page.next_token
        if token is None:
            break
    assert found == ["pages/3/", "pages/4", "pages/5"]


def test_a_restarted_process_completes_an_upload(azurite: Azurite, body: MakeBody) -> None:
    first = closed_later(azure_store(azurite))
    upload = first.create_multipart("later", metadata={"fusecache-generation": "7"})
    etags = [first.upload_part("later", upload, number, body(b"part")) for number in (1, 2)]
    store = closed_later(azure_store(azurite))
    store.complete_multipart("later", upload, etags, condition=Condition(None))
    assert store.head("later").metadata == {"fusecache-generation": "7"}
    with pytest.raises((PartsRefused, ObjectChanged)):
        store.complete_multipart("later", upload, etags, condition=Condition(None))
    with pytest.raises(UploadLost, match="no upload of this store"):
        store.complete_multipart("later", "an id of S3", etags)


def reply(status: str, headers: str = "", text: bytes = b"") -> bytes:
    """A response of a scripted peer."""
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(text)}\r\n{headers}\r\n".encode() + text


def scripted(peer: MakePeer, *answers: bytes) -> AzureStore:
    """A store whose server gives these answers."""
    there = peer([list(answers)])
    endpoint = Endpoint(f"http://127.0.0.1:{there.port}", kind=StoreKind.AZURE, account="account")
    store = open_cloud_store("c", endpoint, {}, transport=Transport(), is_unsigned=True)
    assert isinstance(store, AzureStore)
    return closed_later(store)


@PLAIN
def test_a_hierarchical_namespace_is_refused(peer: MakePeer) -> None:
    store = scripted(peer, reply("200 OK", "x-ms-is-hns-enabled: true\r\n"))
    with pytest.raises(Refused, match=r"az://c: the account has a hierarchical namespace.*choose a storage"):
        store.list_page("")


@PLAIN
def test_keys_that_may_not_ask_still_list(peer: MakePeer) -> None:
    listing = b"<EnumerationResults><Blobs/><NextMarker/></EnumerationResults>"
    store = scripted(
        peer, reply("403 Forbidden"), reply("200 OK", text=listing), reply("200 OK", text=listing)
    )
    assert store.list_page("").objects == ()
    assert store.list_page("").next_token is None


@PLAIN
def test_a_pending_copy_is_waited_for(peer: MakePeer) -> None:
    status = 'ETag: "{}"\r\nx-ms-copy-status: {}\r\n'
    store = scripted(
        peer,
        reply("202 Accepted", status.format("old", "pending")),
        reply("200 OK", status.format("new", "success")),
    )
    assert store.copy(ObjectId("a", "1"), "b") == "new"


def test_upload_ids_carry_the_metadata() -> None:
    endpoint = choose_endpoint({"AZURE_STORAGE_ACCOUNT": "account"}, source="az://c")
    store = open_cloud_store("c", endpoint, {}, transport=Transport(), is_unsigned=True)
    upload = store.create_multipart("a", metadata={"symlink-target": "größe"})
    assert json.loads(base64.urlsafe_b64decode(upload))["metadata"] == {
        "x-ms-meta-symlink_target": "gr%C3%B6%C3%9Fe"
    }
    store.close()
    assert os.environ.get("AZURE_STORAGE_ACCOUNT") is None
