"""Ways to a bucket: proxies that the environment names, and regions that a response names."""

import base64
import ssl
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from fusecache.model.errors import AccessDenied, ConfigError, Refused, Unavailable
from fusecache.model.objects import Extent, ObjectId
from fusecache.remote.clouds.opening import open_cloud_store
from fusecache.remote.endpoints import Credentials, Endpoint, Transport, choose_endpoint
from fusecache.remote.s3.store import S3Store
from fusecache.remote.store import FileSlice
from tests.contract.conftest import ONCE, closed_later
from tests.s3server import Fault, FaultAction, S3Server
from tests.support.gcs_server import GcsServer
from tests.support.peer import Peer
from tests.support.proxy import TunnelProxy

MakeBody = Callable[[bytes], FileSlice]
VARIABLES = [
    name for each in ("http", "https", "all", "no") for name in (f"{each}_proxy", f"{each.upper()}_PROXY")
]
ETAG = "e" * 32
HEAD = (
    f'HTTP/1.1 200 OK\r\nETag: "{ETAG}"\r\nContent-Length: 5\r\n'
    "Last-Modified: Thu, 01 Jan 2026 00:00:00 GMT\r\n\r\n"
).encode()


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No proxy but the test's."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


def s3(url: str | None, region: str = "us-east-1", server: S3Server | None = None) -> S3Store:
    keys = (
        Credentials("key", "secret") if server is None else Credentials(server.access_key, server.secret_key)
    )
    return closed_later(S3Store("bucket", Endpoint(url, region), credentials=keys, transport=ONCE))


def use_all(store: S3Store, body: MakeBody) -> None:
    """Send each kind of request."""
    etag = store.put("a", body(b"bytes"), metadata={})
    buffer = bytearray(5)
    store.get_into(ObjectId("a", etag), Extent(0, 5), memoryview(buffer), lambda _: None)
    assert (bytes(buffer), store.head("a").size) == (b"bytes", 5)
    upload_id = store.create_multipart("b", metadata={})
    store.complete_multipart("b", upload_id, [store.upload_part("b", upload_id, 1, body(bytes(100_000)))])
    assert [each.key for each in store.list_page("").objects] == ["a", "b"]
    store.delete("a")


# ---- proxies


def test_tls_goes_through_a_tunnel_of_the_proxy(body: MakeBody, monkeypatch: pytest.MonkeyPatch) -> None:
    login = base64.b64encode(b"me@here:p:w").decode()
    with S3Server(tls=True) as server, TunnelProxy(server.port, f"Basic {login}") as proxy:
        monkeypatch.setenv("AWS_CA_BUNDLE", str(server.ca_path))
        monkeypatch.setenv("HTTPS_PROXY", f"http://me%40here:p:w@{proxy.address}")
        use_all(s3("https://localhost:9", server=server), body)
        assert set(proxy.targets) == {"localhost:9"}
        # The proxy sees none of the requests, and the server not the proxy's password.
        assert {head.split(" ")[0] for head in proxy.asked} == {"CONNECT"}
        assert not [entry for entry in server.control.log() if "proxy-authorization" in entry.headers]


@pytest.mark.parametrize("login", ["", "me:wrong@"])
def test_a_proxy_that_refuses_is_named_with_the_way_out(monkeypatch: pytest.MonkeyPatch, login: str) -> None:
    with TunnelProxy(9, "Basic other") as proxy:
        monkeypatch.setenv("https_proxy", f"http://{login}{proxy.address}")
        with pytest.raises(
            Unavailable, match=rf"the proxy {proxy.address} .* 407 .*USER:PASSWORD@"
        ) as caught:
            s3("https://far.invalid").head("a")
    assert "wrong" not in str(caught.value)


def test_a_proxy_that_does_not_answer_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(Peer([[b"HTTP/1.1 200", b""]], None, None)) as silent:
        monkeypatch.setenv("https_proxy", f"http://127.0.0.1:{silent.port}")
        with pytest.raises(
            Unavailable, match=rf"HEAD s3://bucket/a: the proxy 127.0.0.1:{silent.port} ended"
        ):
            s3("https://far.invalid").head("a")


def test_without_tls_the_proxy_is_asked_for_whole_urls(
    body: MakeBody, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(Peer([[HEAD, HEAD.replace(b"h: 5", b"h: 0")]], None, None)) as proxy:
        monkeypatch.setenv("http_proxy", f"me:pw@127.0.0.1:{proxy.port}")
        store = s3("http://far.invalid:9000")
        assert store.head("a b").etag == store.put("a b", body(b"bytes"), metadata={}) == ETAG
        requests = [each.split(b"\r\n") for each in proxy.requests]
        assert [lines[0] for lines in requests] == [
            b"HEAD http://far.invalid:9000/bucket/a%20b HTTP/1.1",
            b"PUT http://far.invalid:9000/bucket/a%20b HTTP/1.1",
        ]
        for lines in requests:
            assert b"host: far.invalid:9000" in lines
            assert b"proxy-authorization: Basic " + base64.b64encode(b"me:pw") in lines


def test_no_proxy_leads_straight_to_the_server(body: MakeBody, monkeypatch: pytest.MonkeyPatch) -> None:
    with S3Server() as server, TunnelProxy(9) as proxy:
        monkeypatch.setenv("HTTP_PROXY", f"http://{proxy.address}")
        monkeypatch.setenv("NO_PROXY", "elsewhere,127.0.0.1")
        use_all(s3(server.endpoint_url, server=server), body)
        assert proxy.asked == []


def test_other_clouds_go_through_the_proxy_too(
    certificate: tuple[Path, ssl.SSLContext], monkeypatch: pytest.MonkeyPatch, body: MakeBody
) -> None:
    path, context = certificate
    monkeypatch.setenv("SSL_CERT_FILE", str(path))
    with GcsServer(context) as server, TunnelProxy(int(server.endpoint_url.rpartition(":")[2])) as proxy:
        server.allowed.add("")  # as requests without a token count here
        monkeypatch.setenv("https_proxy", f"http://{proxy.address}")
        endpoint = choose_endpoint({}, source="gs://bucket", endpoint_url="https://localhost:9")
        store = closed_later(
            open_cloud_store("bucket", endpoint, {}, transport=Transport(), is_unsigned=True)
        )
        store.put("a", body(b"1"), metadata={})
        assert (store.head("a").size, set(proxy.targets)) == (1, {"localhost:9"})


@pytest.mark.parametrize(
    "proxy", ["https://secret@proxy:1", "socks5://secret@proxy:1", "http://secret@:1", "http://p:x"]
)
def test_a_proxy_that_cannot_be_used_is_refused(monkeypatch: pytest.MonkeyPatch, proxy: str) -> None:
    monkeypatch.setenv("HTTPS_PROXY", proxy)
    monkeypatch.setenv("ALL_PROXY", "socks5://other")  # for programs that know such proxies
    s3("http://far.invalid")
    with pytest.raises(
        ConfigError, match=r"HTTPS_PROXY = .*http://HOST:PORT.*add far\.invalid to NO_PROXY"
    ) as caught:
        s3("https://far.invalid")
    assert "secret" not in str(caught.value)


# ---- regions


ELSEWHERE = [
    (301, "PermanentRedirect"),
    (307, "TemporaryRedirect"),
    (400, "AuthorizationHeaderMalformed"),
    (400, "IllegalLocationConstraintException"),
]


def region_of(server: S3Server) -> list[str]:
    """Return the regions that the requests are signed for."""
    return [entry.headers["authorization"].split("/")[2] for entry in server.control.log()]


@pytest.mark.parametrize(("status", "code"), ELSEWHERE)
@pytest.mark.parametrize("first", ["put", "head", "list"])
def test_a_region_that_a_response_names_is_followed_once_for_all(
    server: S3Server, body: MakeBody, status: int, code: str, first: str
) -> None:
    server.control.put("there", b"1")
    server.control.faults(Fault(FaultAction.ANSWER, times=1, status=status, code=code, region="eu-west-1"))
    store = s3(server.endpoint_url, server=server)
    {
        "put": lambda: store.put("a", body(bytes(100_000)), metadata={}),
        "head": lambda: store.head("there"),
        "list": lambda: store.list_page(""),
    }[first]()
    server.control.delete("there")
    use_all(store, body)
    assert region_of(server)[0] == "us-east-1"
    assert set(region_of(server)[1:]) == {"eu-west-1"}
    assert store.statistics().errors == 0


@pytest.mark.parametrize(("status", "code"), ELSEWHERE)
def test_a_region_that_is_wrong_too_ends_the_search(server: S3Server, status: int, code: str) -> None:
    server.control.faults(Fault(FaultAction.ANSWER, status=status, code=code, region="eu-west-1"))
    error = AccessDenied if code == "AuthorizationHeaderMalformed" else Refused
    store = s3(server.endpoint_url, server=server)
    for count in (2, 3):  # the second request is signed for the named region already
        with pytest.raises(error, match=code):
            store.list_page("")
        assert len(server.control.log()) == count


@pytest.mark.parametrize("region", ["elsewhere.example/", "a@b", "a.b", "EU"])
def test_a_region_that_is_none_is_not_followed(server: S3Server, region: str) -> None:
    server.control.faults(Fault(FaultAction.ANSWER, status=301, code="PermanentRedirect", region=region))
    with pytest.raises(Refused, match="check the endpoint and the region"):
        s3(server.endpoint_url, server=server).list_page("")
    assert len(server.control.log()) == 1


def test_aws_is_asked_in_the_region_of_the_bucket(body: MakeBody, monkeypatch: pytest.MonkeyPatch) -> None:
    with S3Server(tls=True) as server, TunnelProxy(server.port) as proxy:
        monkeypatch.setenv("AWS_CA_BUNDLE", str(server.ca_path))
        monkeypatch.setenv("https_proxy", f"http://{proxy.address}")
        for name in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"):
            monkeypatch.delenv(name, raising=False)
        server.control.faults(
            Fault(FaultAction.ANSWER, times=1, status=301, code="Moved", region="eu-west-1")
        )
        use_all(s3(None, server=server), body)
        first, *later = proxy.targets
        assert first == "s3.us-east-1.amazonaws.com:443"
        assert set(later) == {"s3.eu-west-1.amazonaws.com:443"}


@pytest.mark.parametrize(
    ("region", "variables", "host"),
    [
        ("us-west-2", {}, "s3.us-west-2.amazonaws.com"),
        ("cn-north-1", {}, "s3.cn-north-1.amazonaws.com.cn"),
        ("mars-1", {}, "s3.mars-1.amazonaws.com"),
        ("us-gov-west-1", {"AWS_USE_FIPS_ENDPOINT": "true"}, "s3-fips.us-gov-west-1.amazonaws.com"),
        ("eu-west-1", {"AWS_USE_DUALSTACK_ENDPOINT": "true"}, "s3.dualstack.eu-west-1.amazonaws.com"),
    ],
)
def test_a_region_of_aws_has_its_host(
    monkeypatch: pytest.MonkeyPatch, region: str, variables: dict[str, str], host: str
) -> None:
    for name in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with TunnelProxy(9, "none may pass") as proxy:
        monkeypatch.setenv("https_proxy", f"http://{proxy.address}")
        with pytest.raises(Unavailable):
            s3(None, region).list_page("")
        assert proxy.targets == [f"{host}:443"]


@pytest.mark.parametrize(
    ("config", "url"),
    [
        ("endpoint_url = http://one.invalid\n", "one.invalid"),
        (
            "endpoint_url = http://one.invalid\nservices = all\n[services all]\ns3 =\n  endpoint_url = http://two.invalid\n",
            "two.invalid",
        ),
    ],
    ids=["of the profile", "of its services"],
)
def test_the_endpoint_of_the_profile_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: str, url: str
) -> None:
    (tmp_path / "config").write_text(f"[default]\n{config}")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    for name in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    with closing(Peer([[HEAD]], None, None)) as proxy:
        monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{proxy.port}")
        assert s3(None).head("a").etag == ETAG
        assert proxy.requests[0].startswith(f"HEAD http://{url}/bucket/a ".encode())
