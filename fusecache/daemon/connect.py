"""Connects a mount to its bucket: creates the stores and checks the credentials before anything is mounted.

Not here: the choice of the endpoint (`remote.endpoints`), and the reload of credentials while the daemon runs (`main`).
"""

import configparser
import os
from collections.abc import Mapping
from pathlib import Path

from fusecache.config.options import MountOptions
from fusecache.model.errors import AccessDenied, MountError, Unavailable
from fusecache.remote.endpoints import URL_VARIABLES, Endpoint, Transport
from fusecache.remote.read_write_split import ReadWriteSplit
from fusecache.remote.s3.store import S3Store


def connect(options: MountOptions, endpoint: Endpoint, *, max_connections: int) -> ReadWriteSplit:
    """Create the stores, and check with one LIST and one write probe that the credentials suffice for the mount."""
    transport = Transport(max_connections=max_connections)

    def open_store(profile: str | None) -> S3Store:
        return S3Store(
            options.bucket,
            endpoint,
            profile=profile,
            credentials_file=options.credentials_file,
            transport=transport,
        )

    reader = open_store(options.profile)
    try:
        reader.list_page(options.prefix, limit=1)
    except Unavailable as exc:
        raise MountError(
            f"{options.source}: cannot reach the bucket: {exc}; check the endpoint {endpoint.url or 'AWS'} "
            f"(--endpoint-url, else {', '.join(URL_VARIABLES)} or R2_ACCOUNT_ID) "
            "and the network, proxy and firewall"
        ) from exc
    if options.read_only:
        return ReadWriteSplit([reader], None)
    writer = reader
    if options.write_profile is not None:
        writer = open_store(options.write_profile)
    try:
        writer.probe_write(options.prefix)
    except AccessDenied as exc:
        raise MountError(
            f"{options.source}: the credentials allow reads but not writes ({exc}); "
            f"mount with --read-only, or use credentials that allow writes"
        ) from exc
    return ReadWriteSplit([reader], writer, prefix=options.prefix)


def keys_from(
    profile: str | None, environ: Mapping[str, str], *, credentials_file: Path | None = None
) -> str:
    """Return the source of the credentials: `environment`, the path of a file, or "" for another link of the chain."""
    if credentials_file is not None:
        return str(credentials_file)
    if profile is None and "AWS_ACCESS_KEY_ID" in environ:
        return "environment"
    path = os.path.expanduser(environ.get("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials"))
    profiles = configparser.RawConfigParser()
    profiles.read(path)
    section = profile or environ.get("AWS_PROFILE", "default")
    return path if profiles.has_option(section, "aws_access_key_id") else ""
