"""`fusecache page`: where the pages of mounts are; and what the page does with the texts of a status."""

from collections.abc import Callable
from typing import Any

from fusecache.page.view import page
from tests.support.mounts import FUSECACHE, Mount, run


def test_it_prints_the_address_and_a_tunnel(
    mount: Callable[..., Mount], free_port: Callable[[], int]
) -> None:
    port = free_port()
    made = mount("--http-address", f"127.0.0.1:{port}")
    first, second = run(FUSECACHE, "page", made.path).stdout.splitlines()
    assert first == f"{made.path}  http://127.0.0.1:{port}/"
    assert second.startswith(f"from another machine: ssh -N -L {port}:127.0.0.1:{port} ")
    assert second.endswith(f", then open http://localhost:{port}/")


def test_a_mount_without_a_page_is_an_error_that_says_how_to_get_one(mount: Callable[..., Mount]) -> None:
    made = mount()
    done = run(FUSECACHE, "page", made.path, check=False)
    assert done.returncode == 1
    assert f"{made.path} has no page: mount it with --http-address 127.0.0.1:9469" in done.stderr
    assert done.stdout == ""


def test_two_mounts_have_two_pages_and_one_tunnel(
    mount: Callable[..., Mount], free_port: Callable[[], int]
) -> None:
    ports = free_port(), free_port()
    points = [mount("--http-address", str(port)).path for port in ports]
    *pages, tunnel = run(FUSECACHE, "page", *points).stdout.splitlines()
    assert pages == [f"{point}  http://127.0.0.1:{port}/" for point, port in zip(points, ports, strict=True)]
    assert all(f" -L {port}:127.0.0.1:{port} " in tunnel for port in ports)


HOSTILE = "<i>&\"'"


def hostile(value: Any) -> Any:
    """Return a status in which every text is one that a browser would take for a tag."""
    if isinstance(value, dict):
        return {key: hostile(each) for key, each in value.items()}
    if isinstance(value, list):
        return [hostile(each) for each in value]
    return HOSTILE if isinstance(value, str) else value


def test_the_page_escapes_every_text_of_a_status(mount: Callable[..., Mount]) -> None:
    status = hostile(mount().status())
    row = {"path": HOSTILE, "cause": HOSTILE, "code": HOSTILE, "remedy": HOSTILE, "kept_as": HOSTILE}
    row |= {"bytes": 10, "sent": 1, "files": 1, "under_way": 0, "request_seconds": 0.0}
    for name in ("waiting", "rejected", "conflicts", "uploading", "writing", "pending_checkpoints"):
        status[name] = [row]
    numbers = dict.fromkeys(
        (
            "step",
            "seconds_a_step",
            "horizon_steps",
            "horizon_bytes",
            "lead_seconds",
            "hit_bytes",
            "missed_bytes",
        ),
        1,
    )
    status["hints"] = {"jobs": [{"job": HOSTILE, "late": 1, "ended_seconds": 0.0, **numbers}]}
    status |= {"rejected_files": 1, "conflict_files": 1, "pending_files": 2, "reasons": [HOSTILE]}
    text = page(status, [])
    assert text.count("&lt;i&gt;&amp;&quot;&#x27;") > 10
    assert "<i>" not in text
