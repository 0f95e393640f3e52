"""Every source of access keys: new keys are taken without a restart, and old ones stay while the source fails."""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fusecache.model.errors import AccessDenied, ConfigError, CredentialsMissing
from fusecache.remote.endpoints import Endpoint
from fusecache.remote.read_write_split import ReadWriteSplit
from fusecache.remote.s3 import credentials
from fusecache.remote.s3.store import S3Store
from fusecache.remote.store import FileSlice
from tests.contract.conftest import ONCE, closed_later
from tests.s3server import Account, S3Server
from tests.support.key_services import KeyService, key_service

# Shorter than the time before the expiry from which botocore renews at each request.
SOON_SECONDS = 60.0
SOURCES = ["credential_process", "web identity", "assume role", "instance role"]


@pytest.fixture
def grant(shared_server: S3Server) -> Iterator[Callable[..., None]]:
    """Make keys valid: `grant("one", "two")`; none of them is at the end."""
    granted: list[str] = []

    def add(*names: str) -> None:
        for name in names:
            shared_server.control.add_account(Account(name, name * 10))
            granted.append(name)

    yield add
    for name in granted:
        shared_server.control.add_account(Account(name, "revoked"))


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """No source but what the test makes; return the path of the AWS configuration."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setattr(credentials, "LONGEST_PAUSE_SECONDS", 0.0)
    return tmp_path / "config"


@pytest.fixture
def services() -> Iterator[KeyService]:
    with key_service() as service:
        yield service


def open_store(
    server: S3Server, profile: str | None = None, *, credentials_file: Path | None = None
) -> S3Store:
    endpoint = Endpoint(server.endpoint_url, "auto", is_r2=True)
    return closed_later(
        S3Store(server.bucket, endpoint, profile=profile, credentials_file=credentials_file, transport=ONCE)
    )


def keys_of(server: S3Server) -> str:
    """Return the access key of the newest request."""
    return str(server.control.log()[-1].access_key)


class Renewing:
    """A source that renews its keys by itself."""

    def __init__(self, kind: str, service: KeyService, config: Path, patch: pytest.MonkeyPatch) -> None:
        service.lifetime_seconds = SOON_SECONDS
        self._service, self._program, self._kind = service, config.parent / "program", kind
        self.profile: str | None = None
        token = config.parent / "token"
        token.write_text("identity")
        role = "role_arn = arn:aws:iam::123456789012:role/run\n"
        match kind:
            case "credential_process":
                self.profile = "run"
                config.write_text(f"[profile run]\ncredential_process = {self._program}\n")
            case "web identity":
                patch.setenv("AWS_ENDPOINT_URL_STS", service.url)
                patch.setenv("AWS_ROLE_ARN", "arn:aws:iam::123456789012:role/run")
                patch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", str(token))
            case "assume role":
                self.profile = "run"
                patch.setenv("AWS_ENDPOINT_URL_STS", service.url)
                config.write_text(
                    f"[profile run]\n{role}source_profile = base\n"
                    "[profile base]\naws_access_key_id = base\naws_secret_access_key = base\n"
                )
            case "instance role":
                for name, value in service.metadata_variables().items():
                    patch.setenv(name, value)

    def give(self, name: str) -> None:
        """Hand out these keys from now on."""
        self._service.status, self._service.keys = 200, (name, name * 10)
        answer = {
            "Version": 1,
            "AccessKeyId": name,
            "SecretAccessKey": name * 10,
            "Expiration": self._service.expiry(),
        }
        self._program.write_text(f"#!/bin/sh\necho '{json.dumps(answer)}'\n")
        self._program.chmod(0o700)

    def fail(self) -> None:
        """Hand out nothing from now on."""
        self._service.status = 400
        self._program.write_text("#!/bin/sh\necho the vault is sealed >&2\nexit 1\n")


@pytest.fixture(params=SOURCES)
def renewing(
    request: pytest.FixtureRequest,
    services: KeyService,
    bare_environment: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Renewing:
    return Renewing(request.param, services, bare_environment, monkeypatch)


# botocore uses an instance role's keys for some minutes more than they say: the service may be overloaded.
SELF_RENEWING = pytest.mark.parametrize(
    "renewing", [each for each in SOURCES if each != "instance role"], indirect=True
)


@SELF_RENEWING
def test_keys_that_expire_are_renewed_in_time(
    shared_server: S3Server, renewing: Renewing, grant: Callable[..., None]
) -> None:
    grant("one", "two")
    renewing.give("one")
    store = open_store(shared_server, renewing.profile)
    store.list_page("")
    assert keys_of(shared_server) == "one"
    renewing.give("two")
    store.list_page("")
    assert keys_of(shared_server) == "two"


@SELF_RENEWING
def test_the_last_keys_outlive_a_failing_source(
    shared_server: S3Server, renewing: Renewing, grant: Callable[..., None], body: Callable[[bytes], FileSlice],
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """Uploads and reads go on with them, the cause is logged once, and the recovered source is used again."""
    grant("one", "two")
    renewing.give("one")
    store = open_store(shared_server, renewing.profile)
    store.list_page("")
    renewing.fail()
    for number in range(3):
        store.put(f"failing-{number}", body(b"1"), metadata={})
        store.list_page("")
        assert keys_of(shared_server) == "one"
    assert len([record for record in caplog.records if "could not be renewed" in record.message]) == 1
    renewing.give("two")
    store.list_page("")
    assert keys_of(shared_server) == "two"


def test_refused_keys_are_renewed_by_a_reload(
    shared_server: S3Server, renewing: Renewing, grant: Callable[..., None]
) -> None:
    """A reload that fails raises, and changes nothing."""
    grant("one", "two")
    renewing.give("one")
    store = open_store(shared_server, renewing.profile)
    store.list_page("")
    renewing.fail()
    with pytest.raises(CredentialsMissing):
        store.reload()
    store.list_page("")
    assert keys_of(shared_server) == "one"
    shared_server.control.revoke("one")
    renewing.give("two")
    store.reload()
    store.list_page("")
    assert keys_of(shared_server) == "two"


def test_a_source_that_fails_at_the_start_is_named(shared_server: S3Server, renewing: Renewing) -> None:
    renewing.fail()
    with pytest.raises(CredentialsMissing):
        open_store(shared_server, renewing.profile).list_page("")


# ---- credentials_file

INI = "[default]\naws_access_key_id = {0}\naws_secret_access_key = {1}\n"
ENVIRONMENT = '# keys\nAWS_ACCESS_KEY_ID={0}\nexport AWS_SECRET_ACCESS_KEY="{1}"\nR2_ACCOUNT_ID=none\n'


def write_keys(path: Path, name: str, form: str = ENVIRONMENT) -> None:
    """Replace the file as careful programs do."""
    fresh = path.with_suffix(".new")
    fresh.touch(mode=0o600)
    fresh.write_text(form.format(name, name * 10))
    fresh.rename(path)


@pytest.mark.parametrize("form", [INI, ENVIRONMENT], ids=["ini", "environment"])
def test_a_changed_credentials_file_is_taken_at_once(
    shared_server: S3Server, grant: Callable[..., None], tmp_path: Path, form: str
) -> None:
    grant("one", "two", "three")
    path = tmp_path / "keys"
    write_keys(path, "one", form)
    store = open_store(shared_server, credentials_file=path)
    store.list_page("")
    write_keys(path, "two", form)
    store.list_page("")
    assert keys_of(shared_server) == "two"
    path.write_text(form.format("three", "three" * 10))  # in place
    store.list_page("")
    assert keys_of(shared_server) == "three"


@pytest.mark.parametrize("fault", ["emptied", "half-written", "removed", "opened"])
def test_a_broken_credentials_file_keeps_the_keys(
    shared_server: S3Server, grant: Callable[..., None], tmp_path: Path, fault: str,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    grant("one", "two")
    path = tmp_path / "keys"
    write_keys(path, "one")
    store = open_store(shared_server, credentials_file=path)
    match fault:
        case "emptied":
            path.write_text("")
        case "half-written":
            path.write_text(ENVIRONMENT.format("two", "")[:40])
        case "removed":
            path.unlink()
        case "opened":
            path.chmod(0o644)
            path.write_text(ENVIRONMENT.format("two", "two" * 10))
    for _ in range(3):
        store.list_page("")
        assert keys_of(shared_server) == "one"
    assert len([record for record in caplog.records if "could not be renewed" in record.message]) == 1
    with pytest.raises(ConfigError, match=str(path)):
        store.reload()
    store.list_page("")
    write_keys(path, "two")
    store.list_page("")
    assert keys_of(shared_server) == "two"


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o602])
def test_a_file_that_others_may_read_is_refused(shared_server: S3Server, tmp_path: Path, mode: int) -> None:
    path = tmp_path / "keys"
    write_keys(path, "one")
    path.chmod(mode)
    with pytest.raises(ConfigError, match=f"chmod 600 {path}"):
        open_store(shared_server, credentials_file=path)


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("", "aws_access_key_id"),
        ("AWS_ACCESS_KEY_ID=one\n", "aws_secret_access_key"),
        ("[other]\naws_access_key_id = one\naws_secret_access_key = two\n", "default"),
        ("\0\x01\xff", "aws_access_key_id"),
    ],
)
def test_a_file_without_keys_says_what_is_missing(
    shared_server: S3Server, tmp_path: Path, text: str, cause: str
) -> None:
    path = tmp_path / "keys"
    path.touch(mode=0o600)
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match=cause):
        open_store(shared_server, credentials_file=path)


def test_profiles_are_sections_of_the_credentials_file(
    shared_server: S3Server, grant: Callable[..., None], tmp_path: Path
) -> None:
    """Broken keys for writing do not take the keys for reading with them."""
    grant("one", "two")
    path = tmp_path / "keys"
    both = INI.format("one", "one" * 10) + INI.replace("default", "writer").format("two", "two" * 10)
    path.touch(mode=0o600)
    path.write_text(both)
    reader = open_store(shared_server, credentials_file=path)
    writer = open_store(shared_server, "writer", credentials_file=path)
    remote = ReadWriteSplit(reader, writer)
    remote.delete("nothing")
    assert keys_of(shared_server) == "two"
    shared_server.control.revoke("two")
    with pytest.raises(AccessDenied):
        remote.delete("nothing")
    path.write_text(INI.format("one", "one" * 10))
    with pytest.raises(ConfigError, match="writer"):
        remote.reload()
    remote.list_page("")
    assert keys_of(shared_server) == "one"
