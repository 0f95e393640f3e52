"""A real headless Chromium: Debian's `chromium` and `chromium-driver`, driven by selenium."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from selenium.webdriver import Chrome, ChromeOptions
from selenium.webdriver.chrome.service import Service

CHROMIUM, DRIVER = "/usr/bin/chromium", "/usr/bin/chromedriver"
DESKTOP, PHONE = (1120, 900), (390, 844)


class Browser:
    """One window with one page."""

    def __init__(self, driver: Chrome) -> None:
        self._driver = driver

    def open(self, url: str) -> None:
        """Open a page; return once it has loaded."""
        self._driver.get(url)

    def resize(self, width: int, height: int) -> None:
        """Show the page as on a screen of this size; a narrow one is a phone's."""
        self._send(
            "Emulation.setDeviceMetricsOverride",
            {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600},
        )

    def prefer_dark(self, *, is_dark: bool) -> None:
        """Say whether the user prefers dark pages."""
        features = [{"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}]
        self._send("Emulation.setEmulatedMedia", {"features": features})

    def without_scripts(self) -> None:
        """Run no script of pages that are opened from now on."""
        self._send("Emulation.setScriptExecutionDisabled", {"value": True})

    def run(self, script: str) -> Any:
        """Return what a script says, run in the page."""
        return self._driver.execute_script(f"return {script}")

    def html(self) -> str:
        """Return the document as it is now."""
        node = self._send("DOM.getDocument", {"depth": 0})["root"]["nodeId"]
        return str(self._send("DOM.getOuterHTML", {"nodeId": node})["outerHTML"])

    def text(self, selector: str = "body") -> str:
        """Return the text that a part of the page shows; it needs scripts."""
        return str(self.run(f"document.querySelector({selector!r}).innerText"))

    @property
    def title(self) -> str:
        """The page's title."""
        return self._driver.title

    def complaints(self) -> list[str]:
        """Return what the console says since the last call: errors of scripts, and what the page's policy refused."""
        return [str(row["message"]) for row in self._driver.get_log("browser")]

    def picture(self, path: Path) -> None:
        """Write what is shown to a PNG."""
        self._driver.save_screenshot(str(path))

    def _send(self, command: str, parameters: dict[str, Any]) -> Any:
        return self._driver.execute_cdp_cmd(command, parameters)


@contextmanager
def browsing(*, width: int = DESKTOP[0], height: int = DESKTOP[1]) -> Iterator[Browser]:
    """Run a browser while the body runs."""
    options = ChromeOptions()
    options.binary_location = CHROMIUM
    for word in ("headless=new", "disable-gpu", "disable-dev-shm-usage", "hide-scrollbars"):
        options.add_argument(f"--{word}")
    if os.geteuid() == 0:
        options.add_argument("--no-sandbox")  # it does not start otherwise
    with TemporaryDirectory() as folder:  # the browser leaves its folders behind
        driver = Chrome(options=options, service=Service(DRIVER, env={**os.environ, "TMPDIR": folder}))
        try:
            browser = Browser(driver)
            browser.resize(width, height)
            yield browser
        finally:
            driver.quit()
