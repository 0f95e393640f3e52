"""Mounts and unmounts: by mount(2) where that is permitted, else by fusermount3, which passes the descriptor back."""

import contextlib
import ctypes
import errno
import os
import select
import shutil
import socket
import stat
import subprocess

from fusecache.fuse.values import MountPlan, MountRefused

DEVICE = "/dev/fuse"
_HELPER = "fusermount3"
_NO_CAPABILITY = "CAP_SYS_ADMIN is missing here; a container gets it with --cap-add SYS_ADMIN"
_HELPER_SECONDS = 30.0
# sys/mount.h
_MS_NOSUID = 2
_MS_NODEV = 4
_MNT_FORCE = 1
_MNT_DETACH = 2

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mount.argtypes = (
    ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_ulong, ctypes.c_char_p
)  # fmt: skip
_libc.umount2.argtypes = (ctypes.c_char_p, ctypes.c_int)


def mount(plan: MountPlan) -> int:
    """Mount, with nosuid, nodev and default_permissions; return the descriptor. Raises MountRefused."""
    try:
        fd = os.open(DEVICE, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError as exc:
        raise MountRefused(
            f"{DEVICE} does not exist: modprobe fuse, or --device {DEVICE} for a container"
        ) from exc
    except PermissionError:
        return _mount_by_helper(plan)  # it belongs to root
    except OSError as exc:
        raise MountRefused(f"{DEVICE} cannot be opened ({exc.strerror}): modprobe fuse") from exc
    try:
        _mount_directly(plan, fd)
    except PermissionError:
        os.close(fd)
        return _mount_by_helper(plan)
    except OSError as exc:
        os.close(fd)
        raise MountRefused(f"mount(2) failed: {exc.strerror}") from exc
    return fd


def unmount(mountpoint: str) -> None:
    """Take a mount away, even from processes that use it; requests that wait fail. No error if it is gone."""
    # By force: a notification that the kernel blocks keeps the connection, after its descriptor was closed.
    flags = _MNT_FORCE | _MNT_DETACH
    if _libc.umount2(os.fsencode(mountpoint), flags) == 0 or ctypes.get_errno() != errno.EPERM:
        return
    helper = shutil.which(_HELPER)
    if helper is not None:
        command = [helper, "-u", "-q", "-z", "--", mountpoint]
        with contextlib.suppress(subprocess.TimeoutExpired):
            subprocess.run(command, check=False, timeout=_HELPER_SECONDS, stdin=subprocess.DEVNULL)


def is_connected(fd: int) -> bool:
    """Return whether the mount of a descriptor is still there."""
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    return not any(events & (select.POLLERR | select.POLLNVAL) for _, events in poller.poll(0))


def _mount_directly(plan: MountPlan, fd: int) -> None:
    kind = stat.S_IFMT(os.stat(plan.mountpoint).st_mode)
    words = f"fd={fd},rootmode={kind:o},user_id={os.getuid()},group_id={os.getgid()},default_permissions"
    if plan.allow_other:
        words += ",allow_other"
    if _libc.mount(
        os.fsencode(plan.source), os.fsencode(plan.mountpoint), f"fuse.{plan.subtype}".encode(),
        _MS_NOSUID | _MS_NODEV, words.encode(),
    ):  # fmt: skip
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _mount_by_helper(plan: MountPlan) -> int:
    helper = shutil.which(_HELPER)
    if helper is None:
        raise MountRefused(
            _NO_CAPABILITY
            if os.geteuid() == 0
            else f"{_HELPER} was not found, and only root can mount without it: apt-get install fuse3"
        )
    source = plan.source.replace("\\", "\\\\").replace(",", "\\,")
    words = ["default_permissions", "nosuid", "nodev", f"subtype={plan.subtype}", f"fsname={source}"]
    if plan.allow_other:
        words.append("allow_other")
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            try:
                done = subprocess.run(
                    [helper, "-o", ",".join(words), "--", plan.mountpoint],
                    env={**os.environ, "_FUSE_COMMFD": str(theirs.fileno())},
                    pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, capture_output=True, check=False,
                    timeout=_HELPER_SECONDS,
                )  # fmt: skip
            except (OSError, subprocess.TimeoutExpired) as exc:
                raise MountRefused(f"{helper} failed: {exc}") from exc
        _, descriptors, _, _ = socket.recv_fds(ours, 1, 1)
    if done.returncode or not descriptors:
        said = done.stderr.decode(errors="replace").strip() or f"exit status {done.returncode}"
        raise MountRefused(f"{said}: {_NO_CAPABILITY}" if "not permitted" in said else said)
    (fd,) = descriptors
    os.set_inheritable(fd, False)  # noqa: FBT003
    return fd
