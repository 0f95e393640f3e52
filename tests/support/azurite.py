"""Azurite, Microsoft's emulator of Azure Blob Storage: a child process on a free port, with a directory of its own.

`make test-stores` installs it into build/azurite.
"""

import socket
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Self

from tests.s3server.ports import reserve
from tests.support import ROOT

PROGRAM = ROOT / "build/azurite/node_modules/.bin/azurite-blob"
# Azurite's account, the same on every machine.
ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
_START_SECONDS = 60.0


class Azurite:
    """The running emulator. Use it in a `with` block."""

    def __init__(self, certificate: Path | None = None) -> None:
        """certificate: of HTTPS, with `key.pem` beside it; then tokens are taken, without a look at their signature."""
        self._arguments = (
            ("--oauth", "basic", "--cert", certificate, "--key", certificate.with_name("key.pem"))
            if certificate
            else ()
        )
        self._held = reserve()
        self._port: int = self._held.getsockname()[1]
        self._directory = tempfile.TemporaryDirectory(prefix="azurite-")
        self.endpoint_url = f"{'https' if certificate else 'http'}://127.0.0.1:{self._port}"
        self.account, self.key = ACCOUNT, KEY

    def __enter__(self) -> Self:
        path = Path(self._directory.name)
        self._log = open(path / "log", "wb")  # closed at the end
        self._process = subprocess.Popen(
            [
                PROGRAM, "--blobHost", "127.0.0.1", "--blobPort", str(self._port), "--location", path,
                "--silent", "--disableTelemetry", *self._arguments,
            ],
            stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log,
        )  # fmt: skip
        deadline = time.monotonic() + _START_SECONDS
        while True:
            try:
                socket.create_connection(("127.0.0.1", self._port), timeout=1).close()
                return self
            except OSError as exc:
                if self._process.poll() is not None or time.monotonic() > deadline:
                    said = (path / "log").read_text()
                    self.__exit__()
                    raise AssertionError(f"Azurite does not listen: {said}") from exc
                time.sleep(0.05)

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait(30)
        self._log.close()
        self._held.close()
        self._directory.cleanup()
