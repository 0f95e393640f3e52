"""Who may talk to a daemon, where its socket lies, and which answers commands believe."""

import json
import os
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from fusecache.model.errors import MountError
from fusecache.model.hints import encode_cursor
from fusecache.mount.control_client import ask, find_mount
from fusecache.mount.runtime_folder import runtime_folder
from tests.support.mounts import FUSECACHE, Mount, open_to_other_users, run, wait_until
from tests.support.other_user import NOBODY, as_nobody, needs_root
from tests.support.s3_buckets import Bucket

MIB = 1 << 20
FOR_OTHERS = ("status", "sync", "hint")
FOR_OWNERS = ("warm", "evict", "check", "recover", "bring-back", "delete", "drain", "abandon", "carry-on")


def socket_of(one: Mount) -> Path:
    """Return the path of a mount's socket."""
    return Path((one.path / ".fusecache" / "socket").read_text().strip())


def mode_of(path: Path) -> int:
    """Return the permission bits of a path."""
    return stat.S_IMODE(path.lstat().st_mode)


def answer_to(path: Path, command: str, **more: Any) -> dict[str, Any]:
    """Send one command to a socket; return the final answer."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(20)
        connection.connect(str(path))
        connection.sendall(json.dumps({"command": command, **more}).encode() + b"\n")
        with connection.makefile("rb") as lines:
            return next(row for line in lines if (row := json.loads(line)).get("done"))


def plan() -> bytes:
    """Return a plan without a path."""
    head = {"fusecache": "plan", "version": 1, "window": 0, "step": 0, "exact": False}
    return json.dumps({**head, "paths": 0, "path_bytes": 0, "extents": 0}).encode() + b"\n"


@contextmanager
def impostor(path: Path, uid: int) -> Iterator[None]:
    """Answer every command at a socket with success, as another user."""
    program = (
        "import json, os, socket, sys\n"
        "os.setgroups([]); os.setgid(int(sys.argv[2])); os.setuid(int(sys.argv[2]))\n"
        "listener = socket.socket(socket.AF_UNIX); listener.bind(sys.argv[1]); listener.listen()\n"
        "print('ready', flush=True)\n"
        "answer = {'done': True, 'result': 'durable', 'message': 'believe me'}\n"
        "while True:\n"
        "    connection, _ = listener.accept()\n"
        "    with connection: connection.sendall(json.dumps(answer).encode() + b'\\n')\n"
    )
    words = [sys.executable, "-c", program, path, str(uid)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            yield
        finally:
            process.kill()


# ---- where the socket is


def test_socket_is_private_by_default(mount: Callable[..., Mount]) -> None:
    path = socket_of(mount())
    assert mode_of(path) == 0o600
    assert mode_of(path.parent) == 0o700
    assert path.parent.stat().st_uid == os.geteuid()


def test_object_cannot_shadow_the_socket(mount: Callable[..., Mount], bucket: Bucket, tmp_path: Path) -> None:
    """Objects of that name stand in the root, and in a folder that is bound to a place of its own."""
    bucket.put(".fusecache/socket", b"/somewhere/else\n")
    bucket.put("run/.fusecache/socket", b"/somewhere/else\n")
    bucket.put("run/file", b"1")
    one = mount()
    assert os.listdir(one.path) == ["run"]
    run("ls", "-laR", one.path)
    assert socket_of(one) != Path("/somewhere/else")
    bound = tmp_path / "bound"
    bound.mkdir()
    run("mount", "--bind", one.path / "run", bound)
    try:
        for path in (one.path, one.path / "run", bound, bound / "file"):
            assert json.loads(run(FUSECACHE, "status", "--json", path).stdout)["pid"] == one.pid
        there = json.loads(run(FUSECACHE, "status", "--json", bound / "file").stdout)
        assert there["path"] == "run/file"
    finally:
        run("umount", bound)


@needs_root
def test_folder_of_another_user_is_not_used(tmp_path: Path) -> None:
    """Another user made the usual folder first, so that commands would talk to a process of that user."""
    open_to_other_users(tmp_path / "x")
    tmp_path.chmod(0o1777)
    taken = tmp_path / f"fusecache-{NOBODY}"
    taken.mkdir(mode=0o777)

    def choose() -> list[Any]:
        tempfile.tempdir = str(tmp_path)
        folder = runtime_folder({"XDG_RUNTIME_DIR": ""}, shared=False)
        return [str(folder), mode_of(folder), folder.stat().st_uid]

    folder, mode, owner = as_nobody(choose)
    assert folder.startswith(f"{tmp_path}/fusecache-")
    assert folder != str(taken)
    assert (mode, owner) == (0o700, NOBODY)


def test_own_folder_that_was_open_is_closed(tmp_path: Path) -> None:
    """As earlier versions made it."""
    tmp_path.chmod(0o700)
    (tmp_path / "fusecache").mkdir(mode=0o755)
    assert runtime_folder({"XDG_RUNTIME_DIR": str(tmp_path)}, shared=False) == tmp_path / "fusecache"
    assert mode_of(tmp_path / "fusecache") == 0o700


def test_runtime_folder_open_to_others_is_not_used(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    assert tmp_path not in runtime_folder({"XDG_RUNTIME_DIR": str(tmp_path)}, shared=False).parents


@pytest.fixture
def runtime() -> Iterator[Path]:
    """A private folder with a short path: pytest's own may be too long for the address of a socket."""
    with tempfile.TemporaryDirectory(prefix="fc-", dir="/tmp", ignore_cleanup_errors=True) as name:
        yield Path(name)


def test_a_long_runtime_folder_is_not_used(
    mount: Callable[..., Mount], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A socket's address has 108 bytes at most: where XDG_RUNTIME_DIR is too long for one, another folder serves."""
    runtime = tmp_path / ("long" * 20)
    runtime.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    one = mount()
    assert one.status()["pid"] == one.pid
    assert runtime not in socket_of(one).parents


def test_commands_survive_the_end_of_a_login(
    mount: Callable[..., Mount],
    runtime: Path,
    monkeypatch: pytest.MonkeyPatch,
    expect_log: Callable[[str], None],
) -> None:
    """A logout removes XDG_RUNTIME_DIR with the socket; the daemon makes another, and ends without a traceback."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    expect_log("control socket was removed")
    one = mount()
    assert socket_of(one).parent == runtime / "fusecache"
    shutil.rmtree(runtime)

    def answers() -> bool:
        with suppress(MountError):
            return bool(one.status()["pid"] == one.pid)
        return False

    wait_until(answers, "a new socket")
    assert mode_of(socket_of(one)) == 0o600
    one.unmount()
    assert "Traceback" not in one.log()


# ---- whose answers count


@needs_root
def test_answers_of_another_user_do_not_count(tmp_path: Path) -> None:
    """Another user owns the folder; or, in a folder of our own, the process that answers."""
    (root := tmp_path / "root").mkdir()
    (root / ".fusecache").mkdir()
    (folder := tmp_path / "his").mkdir()
    os.chown(folder, NOBODY, NOBODY)
    open_to_other_users(folder / "x")
    tmp_path.chmod(0o755)
    (root / ".fusecache" / "socket").write_text(f"{folder}/socket\n")
    with impostor(folder / "socket", NOBODY):
        done = run(FUSECACHE, "sync", root, check=False)
        assert done.returncode == 2
        assert "is not trusted" in done.stderr
        (root / ".fusecache" / "socket").write_text("/missing/socket\n")
        environment = {**os.environ, "FUSECACHE_SOCKET": f"{folder}/socket"}
        done = run(FUSECACHE, "sync", root, check=False, env=environment)
        assert done.returncode == 2
        assert f"a process of user {NOBODY} answers" in done.stderr


# ---- who may send what


@needs_root
def test_private_mount_answers_no_other_user(mount: Callable[..., Mount]) -> None:
    path = socket_of(mount())

    def connect() -> str:
        with socket.socket(socket.AF_UNIX) as connection:
            try:
                connection.connect(str(path))
            except OSError as exc:
                return type(exc).__name__
        return "connected"

    assert as_nobody(connect) == "PermissionError"


@needs_root
def test_other_users_may_ask_and_hint_only(mount: Callable[..., Mount], bucket: Bucket) -> None:
    bucket.put("file", b"1")
    one = mount("--allow-other")
    path = socket_of(one)
    assert (mode_of(path.parent), mode_of(path)) == (0o711, 0o666)
    results = as_nobody(lambda: {each: answer_to(path, each, id=1) for each in (*FOR_OTHERS, *FOR_OWNERS)})
    assert results["status"]["status"]["pid"] == one.pid
    assert results["sync"]["result"] == "durable"
    assert "not a hint file" in results["hint"]["message"]
    for command in FOR_OWNERS:
        assert results[command]["result"] == "error"
        assert f"`{command}` is allowed only for root" in results[command]["message"]
    assert ask(find_mount(one.path, {})[0], "warm").result == "ok"


@needs_root
def test_owner_of_the_files_may_send_every_command(mount: Callable[..., Mount]) -> None:
    """Root mounts for a user, as the service does with `uid`."""
    one = mount("--allow-other", "--uid", str(NOBODY))
    path = socket_of(one)
    assert as_nobody(lambda: answer_to(path, "recover"))["result"] == "ok"
    assert as_nobody(lambda: answer_to(path, "evict"))["result"] == "ok"


# ---- plans belong to a user


@needs_root
def test_plan_belongs_to_the_user_who_sent_it(mount: Callable[..., Mount]) -> None:
    """Other users cannot replace, move or withdraw it, over files or socket; root can."""
    one = mount("--allow-other")
    path = socket_of(one)
    hints = one.path / ".fusecache" / "hints"
    open_to_other_users(one.path)
    (hints / "roots.plan").write_bytes(plan())
    (hints / "roots.cursor").write_bytes(encode_cursor(7))

    def tries() -> list[str]:
        (hints / "his.plan").write_bytes(plan())
        found = []
        for call in (
            lambda: (hints / "roots.plan").write_bytes(plan()),
            lambda: (hints / "roots.cursor").write_bytes(encode_cursor(9)),
            lambda: (hints / "roots.plan").unlink(),
        ):
            try:
                call()
            except OSError as exc:
                found.append(type(exc).__name__)
        answer = answer_to(path, "hint", file="roots.plan", bytes=0)
        return [*found, answer["message"]]

    found = as_nobody(tries)
    assert found[:-1] == ["PermissionError"] * 3
    assert found[-1] == f"roots: user {os.geteuid()} owns the hints of this job; use another job name"
    jobs = {job["job"]: job["step"] for job in one.status()["hints"]["jobs"]}
    assert jobs == {"roots": 7, "his": 0}
    (hints / "his.plan").unlink()
    assert [job["job"] for job in one.status()["hints"]["jobs"]] == ["roots"]


# ---- bounds


@needs_root
@pytest.mark.parametrize(
    ("sends", "refusals", "mebibytes"), [(as_nobody, 50, 200), (lambda flood: flood(), 40, 400)]
)
def test_unfinished_requests_are_bounded(
    mount: Callable[..., Mount], sends: Callable[..., int], refusals: int, mebibytes: int
) -> None:
    """Sixty connections announce the longest message and send nearly all of it."""
    one = mount("--allow-other")
    path = socket_of(one)
    before = resident_bytes(one.pid)
    open_to_other_users(one.path)

    def flood() -> int:
        with ExitStack() as stack:
            connections = [stack.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(60)]
            request = {"command": "hint", "file": "x.plan", "bytes": 16 * MIB}
            for connection in connections:
                connection.settimeout(1)
                connection.connect(str(path))
                with suppress(OSError):
                    connection.sendall(json.dumps(request).encode() + b"\n" + bytes(16 * MIB - 1))
            refused = 0
            for connection in connections:
                with suppress(OSError):  # no answer: the daemon waits for the last byte
                    refused += b"try again later" in connection.recv(4096)
        return refused

    assert sends(flood) > refusals
    assert resident_bytes(one.pid) - before < mebibytes * MIB
    assert one.status()["pid"] == one.pid


def resident_bytes(pid: int) -> int:
    """Return the peak of a process's resident memory."""
    text = Path(f"/proc/{pid}/status").read_text()
    return int(text.partition("VmHWM:")[2].split()[0]) * 1024


@needs_root
def test_connections_of_other_users_are_bounded(mount: Callable[..., Mount], tmp_path: Path) -> None:
    """Others take all that they may; the owner still gets an answer, and so do they when they let go."""
    one = mount("--allow-other")
    path = socket_of(one)
    started, ended = tmp_path / "started", tmp_path / "ended"
    open_to_other_users(started)
    tmp_path.chmod(0o777)

    def fill() -> str:
        held = [socket.socket(socket.AF_UNIX) for _ in range(64)]
        for connection in held:
            connection.connect(str(path))
        refused: str = answer_to(path, "status")["message"]
        started.write_text("")
        wait_until(ended.exists, "the owner's answer")
        for connection in held:
            connection.close()
        return refused

    with ThreadPoolExecutor(1) as pool:
        refusal = pool.submit(as_nobody, fill)
        wait_until(started.exists, "connections that are taken")
        assert one.status()["pid"] == one.pid
        ended.write_text("")
        refused = refusal.result()
    assert refused == "the daemon serves 64 commands already; try again later"
    wait_until(
        lambda: as_nobody(lambda: answer_to(path, "status"))["result"] == "ok", "connections that are free"
    )
