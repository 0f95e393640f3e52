"""What /proc says about a writing process."""

import os
import signal
import subprocess
import sys
import threading
import time

from fusecache.engine.runtime.procfs import is_being_killed, thread_group


def test_a_thread_belongs_to_its_process_and_nobody_to_none() -> None:
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(thread_group(threading.get_native_id())))
    thread.start()
    thread.join()
    assert found == [os.getpid()]
    assert thread_group(os.getpid()) == os.getpid()
    assert thread_group(os.getpid()) == os.getpid()  # remembered
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    assert thread_group(child.pid) == 0


def test_only_who_is_ended_by_a_signal_was_killed() -> None:
    assert not is_being_killed(os.getpid())
    child = subprocess.Popen(["sleep", "60"])
    assert not is_being_killed(child.pid)
    child.send_signal(signal.SIGKILL)
    try:
        deadline = time.monotonic() + 10
        while not is_being_killed(child.pid):  # a zombie keeps its flags until it is waited for
            assert time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        child.wait()
    assert not is_being_killed(child.pid)
