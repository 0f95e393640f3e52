"""Keys for one bucket alone, keys without single rights, and keys from the command line."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing

import pytest

from tests.s3server import Account, ServerProcess, boto_client
from tests.support import ROOT
from tests.unit.s3server.refusals import refusal

DENIED = (403, "AccessDenied")


@pytest.fixture
def buckets() -> Iterator[ServerProcess]:
    """A server with the buckets `one` and `two`, each with the object `key`."""
    with ServerProcess() as server:
        for name in ("one", "two"):
            server.control.add_bucket(name)
            server.control.put("key", b"data", bucket=name)
        yield server
        server.control.close()


def test_key_of_one_bucket_opens_no_other(buckets: ServerProcess) -> None:
    buckets.control.add_account(Account("limited", "secret", buckets=("one",)))
    with closing(boto_client(buckets, access_key="limited", secret_key="secret")) as client:
        client.get_object(Bucket="one", Key="key")["Body"].close()
        assert refusal(client.get_object, Bucket="two", Key="key") == DENIED
        assert refusal(client.list_objects_v2, Bucket="two") == DENIED
        assert refusal(client.copy_object, Bucket="one", Key="copy", CopySource="two/key") == DENIED
        doomed = {"Objects": [{"Key": "key"}]}
        assert refusal(client.delete_objects, Bucket="two", Delete=doomed) == DENIED
        assert refusal(client.list_objects_v2, Bucket="missing") == DENIED


def test_denied_operation_is_refused_alone(buckets: ServerProcess) -> None:
    buckets.control.add_account(Account("limited", "secret", denied=frozenset({"DeleteObject"})))
    with closing(boto_client(buckets, access_key="limited", secret_key="secret")) as client:
        assert refusal(client.delete_object, Bucket="one", Key="key") == DENIED
        answer = client.delete_objects(Bucket="one", Delete={"Objects": [{"Key": "key"}]})
        assert [row.get("Code") for row in answer["Errors"]] == ["AccessDenied"]
        client.put_object(Bucket="one", Key="other", Body=b"new")


def test_accounts_of_the_command_line_work() -> None:
    command = [sys.executable, "-m", "tests.s3server", "--exit-with-stdin"]
    command += ["--account", "reader:secret:read:data", "--account", "writer:secret:write:data"]
    server = ServerProcess()
    with (
        closing(server),
        subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as process,
    ):
        assert process.stdin is not None
        assert process.stdout is not None
        server.endpoint_url = json.loads(process.stdout.readline())["endpoint_url"]
        with (
            closing(boto_client(server, access_key="reader", secret_key="secret")) as reader,
            closing(boto_client(server, access_key="writer", secret_key="secret")) as writer,
        ):
            assert refusal(reader.put_object, Bucket="data", Key="a", Body=b"x") == DENIED
            writer.put_object(Bucket="data", Key="a", Body=b"x")
            assert reader.list_objects_v2(Bucket="data")["KeyCount"] == 1
            assert refusal(writer.list_objects_v2, Bucket="bucket") == DENIED
        process.stdin.close()
        assert process.wait(20) == 0


def test_delete_objects_compares_etags_by_rule(buckets: ServerProcess) -> None:
    wrong = {"Objects": [{"Key": "key", "ETag": f'"{"0" * 32}"'}]}
    with closing(boto_client(buckets)) as client:
        buckets.control.set_rules(conditional_deletes=True)
        answer = client.delete_objects(Bucket="one", Delete=wrong)
        assert [row.get("Code") for row in answer["Errors"]] == ["PreconditionFailed"]
        assert "key" in buckets.control.objects(bucket="one")
        buckets.control.set_rules(conditional_deletes=False)
        assert "Errors" not in client.delete_objects(Bucket="one", Delete=wrong)
        assert buckets.control.objects(bucket="one") == {}
