"""Groups of the options of a mount, and how an option is declared."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fusecache.config.node_limits import default_movers
from fusecache.config.values import (
    Duration,
    as_bucket,
    as_encryption,
    as_flag,
    as_header,
    as_host_port,
    as_http_address,
    as_movers,
    as_names,
    as_path,
    as_prefix,
    as_rate,
    as_text,
    as_url,
    as_weight,
    one_of,
)
from fusecache.remote.endpoints import Credentials

# Names that programs write to before they rename the file. Published only if no rename comes within 60 s.
# From tempfile, torch, git and safetensors; .NAME.XXXXXX from rsync.
TEMP_NAMES = (".tmp*", "*.tmp", "*.tmp.*", "tmp*", "*.partial", ".*.??????")
# Commit markers: files that trainers and dataset writers write last, to say that all other files are complete.
ORDER_LAST = (
    "*.metadata", "_metadata*", "metadata.json", "index.json", "*.index.json", "_shard_sizes.json",
    "trainer_state.json", "latest*", "last.*", "*.symlink", "commit_success.txt", "_SUCCESS", "*.done",
)  # fmt: skip
# Weights of models, of which programs read all, in any order. torch's have no header that tells them from other data.
WHOLE_FILES = (
    "*.safetensors", "*.gguf", "*.distcp", "pytorch_model*.bin", "consolidated*.pth", "*_states.pt",
)  # fmt: skip


def option(
    parse: Callable[[object], Any],
    help_text: str,
    *,
    unit: str = "",
    default_text: str = "",
    metavar: str = "",
    **keywords: Any,
) -> Any:
    """Return the field of an option: how its text is parsed, its help, and how its default is shown."""
    metadata = {
        "parse": parse,
        "help": help_text,
        "unit": unit,
        "default_text": default_text,
        "metavar": metavar,
    }
    return field(metadata=metadata, **keywords)


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionOptions:
    """How the kernel's requests are answered: a group of `MountOptions`."""

    fuse_library: str = option(
        one_of("auto", "own", "pyfuse3"),
        "what answers the kernel's requests: own, in this package; pyfuse3, which the extra `pyfuse3` installs; auto, "
        "own where its self-test passes, else pyfuse3",
        default="auto",
        metavar="auto|own|pyfuse3",
    )
    keep_mounted: bool = option(
        as_flag,
        "let the mount outlive its daemon: a keeper process starts the daemon again if it dies, and until then "
        "system calls wait, and do not fail; needs the own FUSE library",
        default=True,
    )
    movers: int = option(
        as_movers,
        "helper processes that fetch and store bytes and copy them to the kernel, so that one mount can use more "
        "processors; 0 leaves that to the daemon; needs the own FUSE library",
        default_factory=default_movers,
        default_text="one for each 4 processors beyond 2, 4 at most; none below 6 processors",
        metavar="0-16",
    )

    @property
    def has_keeper(self) -> bool:
        """Whether a keeper holds the mount. pyfuse3 hides what a successor needs."""
        return self.keep_mounted and self.fuse_library != "pyfuse3"


@dataclass(frozen=True, slots=True, kw_only=True)
class WritebackOptions:
    """When and how files are uploaded: a group of `MountOptions`."""

    settle_seconds: float = option(
        Duration(0, 3600),
        "delay between the close of a file and the start of its upload",
        unit="seconds",
        default=1.0,
    )
    temp_names: tuple[str, ...] = option(
        as_names,
        "names that programs write to before they rename: uploaded only if no rename comes within 60 s; your list "
        "replaces this one",
        unit="list",
        default=TEMP_NAMES,
    )
    order_last: tuple[str, ...] = option(
        as_names,
        "commit markers: uploaded only after all older changes in their directory; your list replaces this one",
        unit="list",
        default=ORDER_LAST,
    )
    delete_delay: float = option(
        Duration(0, 86400 * 7),
        "delay of deletions in the bucket, for programs that delete the old file before they write the new one; an "
        "unmount applies them at once",
        unit="seconds",
        default=0.0,
    )
    drain_timeout: float = option(
        Duration(1, 86400 * 7),
        "end a stop or unmount if nothing was uploaded for this long, because the keys are refused or the bucket does "
        "not answer; pending files stay in the cache directory, and the next mount uploads them",
        unit="seconds",
        default=300.0,
    )
    conflict: str = option(
        one_of("keep-both", "last-wins"),
        "if another client changed the same file first: keep-both stores your version under a new name, last-wins "
        "replaces theirs (the only choice where the store does not honour If-Match)",
        default="keep-both",
        metavar="keep-both|last-wins",
    )
    fsync: str = option(
        one_of("ordered", "remote"),
        "what fsync waits for: ordered, this node's disk; remote, the bucket (for jobs on several nodes)",
        default="ordered",
        metavar="ordered|remote",
    )
    local_only: tuple[str, ...] = option(
        as_names,
        "names (globs, or prefixes ending in /) whose files are never uploaded",
        unit="list",
        default=(),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointOptions:
    """One place where the data set lies. Each option is a key of an `[[endpoint]]` table."""

    url: str = option(as_url, "URL of the S3 endpoint", default="", default_text="required")
    bucket: str = option(as_bucket, "name of the bucket", default="", default_text="as in source")
    prefix: str | None = option(
        as_prefix, "key prefix of the data set", default=None, default_text="as in source"
    )
    region: str | None = option(as_text, "region of the bucket", default=None, default_text="as of the mount")
    profile: str | None = option(
        as_text, "profile with the credentials", default=None, default_text="as of the mount"
    )
    credentials_file: Path | None = option(  # noqa: RUF009  # a field
        as_path, "file with the keys", default=None, default_text="as of the mount"
    )
    credentials_from: str | None = option(
        as_text,
        "take url, bucket and keys from the variables X_ACCOUNT_ID or X_ENDPOINT_URL, X_BUCKET_NAME, "
        "X_READ_ACCESS_KEY_ID, X_READ_SECRET_ACCESS_KEY and X_WRITE_…, or a whole list from X_BUCKET_LIST",
        default=None,
        default_text="none",
    )
    weight: float = option(as_weight, "share of the objects that are read here", default=1.0)
    primary: bool = option(
        as_flag, "this endpoint takes the writes and gives the names", default=False, default_text="the first"
    )
    read_keys: Credentials | None = None
    write_keys: Credentials | None = None

    @property
    def place(self) -> str:
        """The endpoint in log and status; no two endpoints of a mount have the same."""
        return f"{self.url.rstrip('/') or 'AWS'} s3://{self.bucket}/{self.prefix or ''}"

    @property
    def source(self) -> str:
        """What a mount of this endpoint alone has as its source."""
        return f"s3://{self.bucket}/{self.prefix or ''}".rstrip("/")


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOptions:
    """Where requests go, what they carry, and whether a mount waits for them: a group of `MountOptions`.

    endpoints: of the data set, the primary first; empty if the mount's own options name its only one.
    """

    credentials_from: tuple[str, ...] = option(
        as_names,
        "take bucket, endpoint and keys from the variables X_BUCKET_NAME, X_ACCOUNT_ID or X_ENDPOINT_URL, "
        "X_READ_ACCESS_KEY_ID, X_READ_SECRET_ACCESS_KEY, X_WRITE_…; NAME=X for one of several buckets",
        unit="list",
        default=(),
        metavar="[NAME=]X",
    )

    start_without: str = option(
        one_of("bucket", "keys", "nothing"),
        "how a mount starts whose cache directory was used before: bucket, also if the bucket does not answer, with "
        "cached files and files that wait for upload; keys, also if the bucket refuses the keys or none are found; "
        "nothing, only once the bucket has answered",
        default="bucket",
        metavar="bucket|keys|nothing",
    )
    unsigned: bool = option(
        as_flag, "send requests without keys, for a public bucket; needs read_only", default=False
    )
    requester_pays: bool = option(
        as_flag, "pay for the requests to a bucket whose owner does not (x-amz-request-payer)", default=False
    )
    sse: str | None = option(
        as_encryption,
        "server-side encryption of new objects: AES256; aws:kms, with the account's key, or aws:kms:KEY, with the id "
        "or ARN of one; customer:FILE, for reads too, with the 32 bytes in your file (SSE-C), as they are or in base64 "
        "(chmod 600)",
        default=None,
        default_text="the bucket's default",
        metavar="AES256|aws:kms[:KEY]|customer:FILE",
    )
    storage_class: str | None = option(
        as_header, "storage class of new objects", default=None, default_text="the bucket's default"
    )
    upload_rate: float | None = option(
        as_rate, "most bytes a second of all uploads of this mount", default=None, default_text="no limit"
    )
    download_rate: float | None = option(
        as_rate,
        "most bytes a second of all reads from the bucket; reads of programs go before read-ahead",
        default=None,
        default_text="no limit",
    )
    peers: tuple[str, ...] = option(
        as_names,
        "nodes that mount the same source, whose `fusecache serve` is asked before the bucket, this one among them: "
        "HOST:PORT; file:PATH, one a line; dns:NAME:PORT, all addresses of a name; slurm:PORT, the nodes of the job; "
        "looked up again every 10 s",
        unit="list",
        default=(),
        metavar="NODE,...",
    )
    peers_key_file: Path | None = option(  # noqa: RUF009  # a field
        as_path,
        "file with the key of all nodes, 16 characters or more; only its owner may have access (chmod 600)",
        default=None,
        default_text="none",
    )
    peer_address: str | None = option(
        as_host_port,
        "HOST:PORT of this node among the peers",
        default=None,
        default_text="the peer whose address is one of this node's",
    )
    read_timeout: float = option(
        Duration(1, 86400),
        "time without any answer of the bucket, after which reads of data that is not cached fail with EIO, and "
        "lookups of names that are not known",
        unit="seconds",
        default=60.0,
    )
    endpoints: tuple[EndpointOptions, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class MonitoringOptions:
    """What the mount logs, and where monitoring reads its numbers: a group of `MountOptions`."""

    log_level: str = option(
        one_of("debug", "info", "warning", "error"),
        "lowest level of the messages to log",
        default="info",
        metavar="debug|info|warning|error",
    )
    log_format: str = option(
        one_of("text", "json"),
        "format of the log: text, or json, one object a line",
        default="text",
        metavar="text|json",
    )
    http_address: str | None = option(
        as_http_address,
        "IP:PORT of a web page that shows the mount, with /metrics for Prometheus; on 127.0.0.1 every user of this "
        "node can read it, any other address needs http_token_file",
        default=None,
        default_text="none",
        metavar="IP:PORT",
    )
    http_token_file: Path | None = option(  # noqa: RUF009  # a field
        as_path,
        "file with the token that http_address asks for, 16 characters or more; only its owner may have access "
        "(chmod 600)",
        default=None,
        default_text="none",
    )
