"""What can go wrong, named for what happened. `fs/errno_table.py` maps each to an errno, once.

Every message names the object, the cause and, where the user can do something, the way out.
"""


class FusecacheError(Exception):
    """Base of every error that a user can meet."""


class ConfigError(FusecacheError):
    """The configuration is wrong; the message says which key and what is allowed."""


class MountError(FusecacheError):
    """The mount cannot start; nothing is left half-mounted."""


class StateError(FusecacheError):
    """The cache directory cannot be used: in use, of another bucket, of a newer format, unreadable."""


# ---- the bucket's answers


class RemoteError(FusecacheError):
    """The bucket did not do what it was asked.

    asks_to_slow_down: the answer was a 429, SlowDown or 5xx: the whole client should ask less.
    retry_after_seconds: how long it said to wait, if it said so.
    """

    asks_to_slow_down: bool = False
    retry_after_seconds: float | None = None


class ObjectMissing(RemoteError):
    """There is no such object (404 NoSuchKey)."""


class BucketMissing(RemoteError):
    """There is no such bucket (404 NoSuchBucket)."""


class ObjectChanged(RemoteError):
    """The object is no longer the version that was asked for (412, or another ETag in the answer)."""


class AccessDenied(RemoteError):
    """The credentials are refused (401, 403, SignatureDoesNotMatch, …): final only after a while."""


class CredentialsMissing(RemoteError):
    """No credentials were found in the usual places."""


class Unavailable(RemoteError):
    """Worth another try: 429, 5xx, time-outs, resets, short bodies."""


class Throttled(Unavailable):
    """429 or SlowDown: the whole client should slow down."""

    asks_to_slow_down = True


class NotAsSent(Unavailable):
    """The bucket got other bytes than were announced (BadDigest): they were damaged on the way, or here."""


class UploadLost(RemoteError):
    """The multipart upload is unknown (NoSuchUpload): start it again."""


class Refused(RemoteError):
    """The bucket will never take this request (EntityTooLarge, 411, a lock policy, …)."""


class PartsRefused(Refused):
    """The bucket makes no object of these parts (InvalidPart, …): sent anew, they may be as it wants them."""


# Errors that pass by themselves, or that a person can fix while requests are retried.
TRANSIENT = (Unavailable, AccessDenied, CredentialsMissing, BucketMissing)


# ---- the node


class NoSpace(FusecacheError):
    """The disk limit is reached and nothing clean is left to evict."""


class LocalDiskError(FusecacheError):
    """The node's own disk failed."""


class NotFound(FusecacheError):
    """There is no such name."""


class AlreadyExists(FusecacheError):
    """The name is taken."""


class NotADirectory(FusecacheError):
    """A directory was needed."""


class IsADirectory(FusecacheError):
    """A file was needed."""


class NotEmpty(FusecacheError):
    """The directory has entries."""


class ReadOnly(FusecacheError):
    """The mount is read-only."""


class InvalidName(FusecacheError):
    """The name cannot be a key, or the key cannot be a name."""


class NameTooLong(InvalidName):
    """The name, or the key that its path makes, is longer than allowed."""


class Interrupted(FusecacheError):
    """Who asked is being killed, and waits no longer."""


class AcrossDevices(FusecacheError):
    """The two names are not kept in one place: what is published, and what never is."""


class NotPermitted(FusecacheError):
    """The operation is not offered (a hard link, a device node)."""


class TooLarge(FusecacheError):
    """The file is larger than the bucket can hold (4.995 TiB)."""


class Damaged(FusecacheError):
    """Bytes do not match their checksum or their length; nothing is made up."""
