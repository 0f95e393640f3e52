"""Writes docs/how-to/page/*.png: the web page in five situations, and this site, on a desktop and on a phone.

`make pictures`, with FUSE, Debian's Chromium and the site of `make docs`. The status is that of a real mount of the
test server. Its folder's name, the curves of the hour before, the job and the prices are made up: they would take an
hour and a GPU.
"""

import math
import random
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, make_server

from PIL import Image

from fusecache.page.history import SAMPLES, STEP_SECONDS, Sample
from fusecache.page.view import HEADERS, page
from tests.s3server import ServerProcess
from tests.support import ROOT
from tests.support.browser import DESKTOP, PHONE, Browser, browsing
from tests.support.daemons import MIB, Daemon, wait_until

FOLDER = ROOT / "docs" / "how-to" / "page"
SITE = ROOT / "build" / "site"
MOST_BYTES = 60_000
_COLOURS = (64, 48, 32, 24)
# An epoch begins when the hour is a quarter over: its first reads come from the bucket.
_COLD = range(SAMPLES // 4, SAMPLES // 4 + 40)
_CHECKPOINT_EVERY = 90
_JOB = {
    "job": "llama-8b",
    "step": 18240,
    "seconds_a_step": 0.412,
    "horizon_steps": 610,
    "horizon_bytes": 14 << 30,
    "lead_seconds": 251.0,
    "hit_bytes": 996 << 30,
    "missed_bytes": 3 << 30,
    "late": 2,
    "ended_seconds": 0.0,
}


class _Quiet(WSGIRequestHandler):
    def log_message(self, format: str, *arguments: Any) -> None:
        """Say nothing."""


def samples(situation: str) -> list[Sample]:
    """Return an hour of a training run up to a situation."""
    chance = random.Random(1)
    found = []
    for index in range(SAMPLES):
        reads = (600 + 60 * math.sin(index / 37) + chance.uniform(0, 60)) * MIB
        part = max(0.0, 1 - (index - _COLD.start) / len(_COLD)) if index in _COLD else 0.002
        is_silent = situation in ("degraded", "action") and index > SAMPLES - 25
        is_checkpoint = index % _CHECKPOINT_EVERY < 14 or (situation == "uploading" and index > SAMPLES - 3)
        sends = chance.uniform(180, 210) * MIB if is_checkpoint else 0.0
        found.append(
            Sample(
                uptime=index * STEP_SECONDS,
                memory_bytes=reads * (1 - part) * 0.3,
                disk_bytes=reads * (1 - part) * 0.7,
                peer_bytes=0.0,
                bucket_bytes=0.0 if is_silent else reads * part,
                sent_bytes=0.0 if is_silent else sends,
                fetched_bytes=0.0 if is_silent else reads * (part + 0.05),
                requests=0.4 if is_silent else 80 * part + chance.uniform(1, 4),
                dollars=0.9 + 2.5 * part + 0.05 * math.sin(index / 20),
            )
        )
    return found


@contextmanager
def served(read_page: Callable[[], str]) -> Iterator[str]:
    """Serve a page with the headers that the daemon sends; yield its address."""

    def answer(_: object, start: Any) -> list[bytes]:
        start("200 OK", list(HEADERS))
        return [read_page().encode()]

    server = make_server("127.0.0.1", 0, answer, handler_class=_Quiet)
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/"
    finally:
        server.shutdown()
        server.server_close()


def html(mount: Daemon, situation: str) -> str:
    """Return the page of a mount's status, as of a node where a job trains."""
    status = mount.status()
    status["hints"] = {"jobs": [_JOB]}
    status["costs"] |= {"prices": "R2's prices", "dollars_per_day": 0.9}
    text = page(status, samples(situation))
    names = {mount.log_path: "/nvme/cache/fusecache.log", mount.path: "/data", mount.cache: "/nvme/cache"}
    for path, name in names.items():
        text = text.replace(str(path), name)
    return text.replace(mount.server.endpoint_url, "https://ACCOUNT.r2.cloudflarestorage.com")


def picture(browser: Browser, name: str, *, is_whole: bool = True) -> None:
    """Write both pictures of what the browser shows. is_whole: also what one would have to scroll to."""
    for screen, (width, height) in {"desktop": DESKTOP, "phone": PHONE}.items():
        browser.resize(width, height)
        browser.prefer_dark(is_dark=screen == "phone")
        if is_whole:
            browser.resize(width, int(browser.run("document.documentElement.scrollHeight")))
        path = FOLDER / f"{name}-{screen}.png"
        browser.picture(path)
        with Image.open(path) as image:
            image.load()
        for colours in _COLOURS:
            small = image.quantize(colours, Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE)
            small.save(path, optimize=True)
            if path.stat().st_size < MOST_BYTES:
                break
        assert path.stat().st_size < MOST_BYTES, f"{path} has {path.stat().st_size} bytes"


def situations(server: ServerProcess, mount: Daemon) -> Iterator[tuple[str, str]]:
    """Bring the mount into one situation after the other: name, and how its verdict begins."""
    control = server.control
    data = bytes(range(256)) * (MIB // 256)
    for number in range(8):
        control.put(f"dataset/shard.{number:05d}.mds", data * 4)
    mount.mount("--cache-size", "600MiB")
    for path in sorted((mount.path / "dataset").iterdir()):
        path.read_bytes()
    yield "fine", "OK"
    control.set(upload_bandwidth=8 * MIB)
    folder = mount.path / "checkpoints" / "step-18000"
    folder.mkdir(parents=True)
    for number in range(2):
        (folder / f"__{number}_0.distcp").write_bytes(data * 96)
    wait_until(lambda: sum(each["sent"] for each in mount.status()["uploading"]) > 60 * MIB, "a part", 60)
    control.set(upload_bandwidth=MIB // 2)
    yield "uploading", "OK"
    control.pause()
    yield "degraded", "DEGRADED"
    control.revoke(server.access_key)
    control.set(upload_bandwidth=None)
    control.resume()
    yield "action", "ACTION"


def main() -> int:
    """Take the pictures."""
    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as name, ServerProcess() as server, browsing() as browser:
        mount = Daemon(server, Path(name), "--no-keep-mounted")
        try:
            for situation, verdict in situations(server, mount):
                wait_until(
                    lambda verdict=verdict: mount.status()["verdict"] == verdict, situation, seconds=180
                )
                shown = html(mount, situation)
                with served(lambda shown=shown: shown) as url:
                    browser.open(url)
                    picture(browser, situation)
                    if situation != "uploading":
                        continue
                wait_until(lambda: browser.title.startswith("STOPPED"), "the stop")
                picture(browser, "stopped")
        finally:
            mount.clean_up()
        browser.prefer_dark(is_dark=False)
        browser.open(f"file://{SITE}/how-to/install.html")
        picture(browser, "site", is_whole=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
