"""The web page of a real mount in a real Chromium. `make test-page`."""

import os
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.mount.conftest import ExpectedLog
from tests.support.browser import PHONE, Browser
from tests.support.mounts import Mount, wait_until
from tests.support.s3_buckets import Bucket

pytestmark = [pytest.mark.fuse, pytest.mark.s3server_only]
# Files that are closed wait this long: longer than a test.
WAITS = ("--settle-seconds", "600")
HOSTILE = (
    "<img src=x onerror=document.title='owned'>",
    "\"'><script>document.title='owned'<",
    "{{main}} `code` &amp; \x1b[31m\u202e",
)
MANY = int(os.environ.get("FUSECACHE_TEST_PENDING_FILES", "100000"))
_THREADS = 64
# A page of a mount where nothing happens has 11 KB.
_SMALL_BYTES = 40_000


@pytest.fixture
def url(free_port: Callable[[], int]) -> str:
    return f"http://127.0.0.1:{free_port()}/"


def address(url: str) -> tuple[str, str]:
    """Return the flags of a mount with this page."""
    return "--http-address", url.removeprefix("http://").rstrip("/")


def test_the_page_says_how_the_mount_is_and_refreshes_itself(
    mount: Callable[..., Mount], browser: Browser, url: str
) -> None:
    made = mount(*WAITS, *address(url))
    browser.open(url)
    assert browser.title == f"OK · {made.path}"
    assert "Everything works." in browser.text(".verdict:not(#stopped)")
    assert "the bucket has every closed file" in browser.text("main")
    browser.run("window.isTheSamePage = true")
    (made.path / "step-100").mkdir()
    (made.path / "step-100" / "model").write_bytes(bytes(3 << 20))
    wait_until(lambda: "3.0 MiB\n\nwould be lost with this node now" in browser.text("main"), "the new file")
    assert browser.run("window.isTheSamePage")
    assert "Checkpoints not in the bucket yet" in browser.text("main")
    assert "step-100/" in browser.text("main")


def test_curves_appear_once_the_mount_was_read(
    mount: Callable[..., Mount], bucket: Bucket, browser: Browser, url: str
) -> None:
    bucket.put("data", bytes(8 << 20))
    made = mount(*address(url))
    browser.open(url)
    assert browser.run("document.querySelectorAll('polygon').length") == 0

    def read() -> bool:
        with open(made.path / "data", "rb") as file:
            assert file.read() == bytes(8 << 20)
            os.posix_fadvise(
                file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED
            )  # else the kernel answers the next one
        return "MiB/s" in browser.text("figure")

    wait_until(read, "a curve", seconds=60)
    assert browser.run("document.querySelectorAll('polygon').length") == 3


def test_a_name_chosen_by_a_writer_of_the_bucket_is_only_text(
    mount: Callable[..., Mount], browser: Browser, url: str
) -> None:
    made = mount("--settle-seconds", "0", *address(url))
    made.bucket.control.set(upload_bandwidth=1000)
    try:
        for name in HOSTILE:
            (made.path / name).write_bytes(bytes(50_000))
        wait_until(lambda: len(made.status()["uploading"]) == len(HOSTILE), "the uploads")
        browser.open(url)
        for _ in range(2):  # as it came, and as the script put it there
            shown = browser.text("main")
            assert HOSTILE[0] in shown
            assert HOSTILE[1] in shown
            assert r"{{main}} code &amp; \x1b[31m\u202e" in shown
            assert browser.run("document.querySelectorAll('img, main script').length") == 0
            assert browser.title == f"OK · {made.path}"
            browser.run("document.querySelector('main').dataset.old = 'yes'")
            wait_until(lambda: not browser.run("document.querySelector('main').dataset.old"), "a refresh")
    finally:
        made.bucket.control.set(upload_bandwidth=None)


def test_the_page_says_that_the_daemon_stopped_and_comes_back_with_it(
    mount: Callable[..., Mount], browser: Browser, url: str, expect_log: ExpectedLog
) -> None:
    expect_log("recovered files=1")
    flags = (*WAITS, "--no-keep-mounted", *address(url))
    made = mount(*flags)
    (made.path / "file").write_bytes(bytes(2000))
    browser.open(url)
    assert "2.0 KiB" in browser.text("main")
    made.kill()
    wait_until(lambda: browser.title == f"STOPPED · {made.path}", "the stop")
    stopped = browser.text("#stopped")
    assert "The daemon does not answer" in stopped
    assert f"fusecache status {made.path}" in stopped
    assert str(made.cache) in stopped
    assert "2.0 KiB" in browser.text("main")  # what it last said
    made.start(*flags)
    wait_until(lambda: browser.title.startswith("OK · "), "the daemon")
    assert browser.run("document.querySelector('#stopped').offsetHeight") == 0


def test_a_hanging_daemon_counts_as_stopped(mount: Callable[..., Mount], browser: Browser, url: str) -> None:
    made = mount("--no-keep-mounted", *address(url))
    browser.open(url)
    made.stop()
    try:
        wait_until(lambda: browser.title.startswith("STOPPED"), "the stop", seconds=60)
    finally:
        os.kill(made.pid, 18)
    wait_until(lambda: browser.title.startswith("OK"), "the daemon")


def test_without_javascript_the_page_shows_the_same(
    mount: Callable[..., Mount], browser: Browser, url: str
) -> None:
    made = mount(*WAITS, *address(url))
    (made.path / "file").write_bytes(bytes(2000))
    browser.without_scripts()
    browser.open(url)
    html = browser.html()
    assert "<h1>OK</h1>" in html
    assert "2.0 KiB" in html
    assert '<noscript><meta http-equiv="refresh" content="10"></noscript>' in html


def test_a_phone_shows_it_without_scrolling_sideways(
    mount: Callable[..., Mount], browser: Browser, url: str
) -> None:
    made = mount("--settle-seconds", "0", *address(url))
    made.bucket.control.set(upload_bandwidth=1000)
    try:
        (made.path / ("name" * 60)).write_bytes(bytes(50_000))
        wait_until(lambda: made.status()["uploading"], "the upload")
        browser.resize(*PHONE)
        browser.open(url)
        assert "name" * 60 in browser.text("main")
        assert browser.run("document.documentElement.scrollWidth") == PHONE[0]
    finally:
        made.bucket.control.set(upload_bandwidth=None)


def test_a_token_opens_the_page_and_keeps_it_fresh(
    mount: Callable[..., Mount], browser: Browser, free_port: Callable[[], int], tmp_path: Path
) -> None:
    token = tmp_path / "token"
    token.write_text("0123456789abcdef")
    token.chmod(0o600)
    port = free_port()
    made = mount(*WAITS, "--http-address", f"0.0.0.0:{port}", "--http-token-file", str(token))
    with pytest.raises(urllib.request.HTTPError, match="401"):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=10)
    browser.open(f"http://user:0123456789abcdef@127.0.0.1:{port}/")
    assert browser.title.startswith("OK")
    (made.path / "file").write_bytes(bytes(2000))
    wait_until(lambda: "2.0 KiB" in browser.text("main"), "the new file")


@pytest.mark.timeout(1200)
def test_with_many_pending_files_the_page_is_small(
    mount: Callable[..., Mount], browser: Browser, url: str
) -> None:
    made = mount("--settle-seconds", "3600", "--no-keep-mounted", *address(url))

    def write(thread: int) -> None:
        folder = made.path / f"step-{thread}"
        folder.mkdir()
        for number in range(MANY // _THREADS + 1):
            (folder / str(number)).touch()

    with ThreadPoolExecutor(_THREADS) as pool:
        list(pool.map(write, range(_THREADS)))
    try:
        with urllib.request.urlopen(url, timeout=60) as answer:
            assert len(answer.read()) < _SMALL_BYTES
        browser.open(url)
        changes = _THREADS * (MANY // _THREADS + 2)  # a folder, and its files
        assert f"Uploading {changes:,} changes".replace(",", " ") in browser.text("main")
        assert browser.run("document.querySelectorAll('tr').length") < 40
    finally:
        made.kill()  # nothing is uploaded
