"""Warnings about a mount that works, but risks data: an unencrypted endpoint, a cache in memory or on a network."""

import ipaddress
import os
import socket
from pathlib import Path
from urllib.parse import urlsplit

from fusecache.config.options import MountOptions
from fusecache.mount.mount_table import TABLE, mounted_types
from fusecache.remote.endpoints import Endpoint, StoreKind

_MEMORY_TYPES = frozenset({"tmpfs", "ramfs"})
_NETWORK_TYPES = frozenset({"nfs", "nfs4", "cifs", "smb3", "9p", "afs", "ceph"})


def risk_texts(options: MountOptions, endpoint: Endpoint) -> list[str]:
    """Return one text for each risk of a mount."""
    urls = dict.fromkeys((endpoint.url, *(each.url for each in options.requests.endpoints)))
    return [
        *(text for url in urls for text in _endpoint_texts(url)),
        *_cache_texts(options),
        *_promise_texts(options),
    ]


def _promise_texts(options: MountOptions) -> list[str]:
    """Return what the store cannot promise."""
    if options.kind is not StoreKind.GCS or options.read_only:
        return []
    return [
        "Google Cloud Storage takes no precondition for a file over 64 MiB, which is uploaded in parts: if another "
        "client replaces it in the same moment, one of the two versions is lost"
    ]


def _endpoint_texts(url: str | None) -> list[str]:
    parts = urlsplit(url or "")
    if parts.scheme != "http" or not parts.hostname or not is_public(parts.hostname):
        return []
    return [
        f"the endpoint {url} is not encrypted: everyone on the network path can read and change the data; "
        "use https:// if the store has it"
    ]


def is_public(host: str) -> bool:
    """Return whether a host name has an address on the public Internet."""
    try:
        found = {facts[4][0] for facts in socket.getaddrinfo(host, None)}
    except OSError:
        return False  # the connection will say what is wrong
    return any(ipaddress.ip_address(str(address).partition("%")[0]).is_global for address in found)


def _cache_texts(options: MountOptions) -> list[str]:
    kind = file_system_of(options.cache_dir)
    if kind in _MEMORY_TYPES and not options.read_only:
        return [
            f"the cache directory {options.cache_dir} is in memory ({kind}): a reboot loses files that wait for "
            "upload; choose a disk with --cache-dir"
        ]
    if kind in _NETWORK_TYPES:
        return [
            f"the cache directory {options.cache_dir} is on a network file system ({kind}), which is slow and may "
            "lose locks and synced writes; choose a local disk with --cache-dir"
        ]
    return []


def file_system_of(path: Path, mount_table: Path = TABLE) -> str:
    """Return the type of the file system that a path is on, by the mount table; the path need not exist."""
    types = mounted_types(mount_table.read_bytes())
    resolved = Path(os.path.realpath(path))
    return next((types[str(each)] for each in (resolved, *resolved.parents) if str(each) in types), "")
