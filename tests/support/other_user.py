"""Runs a function as another user, in a child process. Needs root."""

import json
import os
import traceback
from collections.abc import Callable
from typing import Any

import pytest

NOBODY = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")


def as_nobody(call: Callable[[], Any]) -> Any:
    """Return what a function returns as user 65534, through JSON. Fails the test if the function raises."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.close(reader)
            os.chdir("/")
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            os.write(writer, json.dumps(call()).encode())
            status = 0
        except BaseException:  # noqa: BLE001  # nothing of the child may go on in pytest
            os.write(writer, traceback.format_exc().encode())
        finally:
            os._exit(status)
    os.close(writer)
    with open(reader) as answers:
        text = answers.read()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, text
    return json.loads(text)
