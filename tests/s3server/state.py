"""Everything the server knows, in one place: buckets, keys, rules, settings, script, log."""

import threading
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Unpack

from tests.s3server.accounts import Account, Accounts
from tests.s3server.errors import S3Error
from tests.s3server.faults import Fault, FaultAction, Script
from tests.s3server.objects import Bucket, Clock
from tests.s3server.request_log import LogEntry, RequestLog
from tests.s3server.rules import Rules, RulesChange, Settings, SettingsChange
from tests.s3server.uploads import Uploads
from tests.s3server.wire import Connection, Request


class State:
    """What requests and `Control` share. Buckets are directories below `directory`."""

    def __init__(self, directory: Path, account: Account, rules: Rules, settings: Settings) -> None:
        self.directory = directory
        self.accounts = Accounts([account])
        self.clock = Clock()
        self.script = Script()
        self.log = RequestLog()
        self.rules = self._rules = rules
        self.settings = self._settings = settings
        self._account = account
        self._lock = threading.Lock()
        self._buckets: dict[str, tuple[Bucket, Uploads]] = {}
        directory.mkdir(parents=True, exist_ok=True)
        for path in sorted(directory.iterdir()):
            if (path / "objects").is_dir():
                self.add_bucket(path.name)

    def reset(self) -> None:
        """Forget what clients and tests changed, except which buckets there are."""
        self.accounts = Accounts([self._account])
        self.rules, self.settings = self._rules, self._settings
        self.clock.reset()
        self.script.clear()
        with self._lock:
            buckets = list(self._buckets.values())
        for bucket, uploads in buckets:
            bucket.clear()
            for upload in uploads.all():
                uploads.abort_by_id(upload.upload_id)
        self.log.clear()

    def add_bucket(self, name: str) -> None:
        """Create or open a bucket. S3Error BucketAlreadyOwnedByYou."""
        with self._lock:
            if name in self._buckets:
                raise S3Error("BucketAlreadyOwnedByYou", "The bucket you tried to create already exists.")
            bucket = Bucket(name, self.directory / name, self.clock, lambda: self.rules)
            uploads = Uploads(bucket)
            bucket.remove_rubbish(uploads.owned_bodies())
            self._buckets[name] = (bucket, uploads)

    def find_bucket(self, name: str) -> tuple[Bucket, Uploads]:
        """Return a bucket and its uploads. S3Error NoSuchBucket."""
        with self._lock:
            if name not in self._buckets:
                raise S3Error("NoSuchBucket", "The specified bucket does not exist.")
            return self._buckets[name]

    def buckets(self) -> list[Bucket]:
        """Return all buckets in the order of their names."""
        with self._lock:
            return [self._buckets[name][0] for name in sorted(self._buckets)]

    def change_rules(self, **changes: Unpack[RulesChange]) -> None:
        """Change fields of the rules; the next request sees it."""
        self.rules = replace(self.rules, **changes)

    def change_settings(self, **changes: Unpack[SettingsChange]) -> None:
        """Change fields of the settings; transfers in progress see it."""
        self.settings = replace(self.settings, **changes)


@dataclass(slots=True)
class Exchange:
    """One authenticated request on its way through an operation."""

    state: State
    request: Request
    connection: Connection
    entry: LogEntry
    account: Account
    key: str
    base_url: str
    bucket_name: str = ""
    fault: Fault | None = None
    _found: tuple[Bucket, Uploads] | None = field(default=None)

    @property
    def bucket(self) -> Bucket:
        """The bucket asked for. S3Error NoSuchBucket."""
        return self._find()[0]

    @property
    def uploads(self) -> Uploads:
        """The uploads of the bucket asked for. S3Error NoSuchBucket."""
        return self._find()[1]

    @property
    def rules(self) -> Rules:
        """The rules in force."""
        return self.state.rules

    def query(self, name: str, default: str = "") -> str:
        """Return a query parameter."""
        return self.request.query.get(name, default)

    def query_int(self, name: str, default: int, *, low: int, high: int) -> int:
        """Return a whole number between `low` and `high` (greater is cut to it). S3Error InvalidArgument."""
        value = self.query(name, str(default))
        if not value.isdecimal() or int(value) < low:
            raise S3Error("InvalidArgument", f"{name} must be a number from {low} on, not {value!r}")
        return min(int(value), high)

    def header(self, name: str) -> str | None:
        """Return a header by its lower-case name."""
        return self.request.header(name)

    def check_midway(self) -> None:
        """Fail if the script says so: the body has come, and nothing is stored. S3Error."""
        if self.fault is not None and self.fault.action is FaultAction.ANSWER_MIDWAY:
            raise S3Error(self.fault.code, "scripted", status=self.fault.status)

    def wrote(self) -> None:
        """Say that the bucket has changed."""
        self.entry.took_effect = True

    def _find(self) -> tuple[Bucket, Uploads]:
        if self._found is None:
            self._found = self.state.find_bucket(self.bucket_name)
        return self._found
