"""All errors, named for what happened. `fs/handlers.py` maps each to an errno.

Every message names the object, the cause and, where the user can act, the command or setting that helps.
"""


class FusecacheError(Exception):
    """Base of all errors that a user can see."""


class ConfigError(FusecacheError):
    """The configuration is wrong. The message names the key and the allowed values."""


class MountError(FusecacheError):
    """The mount cannot start. Nothing is left half-mounted."""


class StateError(FusecacheError):
    """The cache directory cannot be used: in use, of another bucket, of a newer format, or unreadable."""


class FolderError(FusecacheError):
    """A plain folder cannot take a bucket's objects, or one of its files cannot: it is left as it is."""


class InternalError(FusecacheError):
    """A bug: a task of the daemon failed unexpectedly. The log has its traceback, and `status` counts it."""


# ---- errors of the bucket


class RemoteError(FusecacheError):
    """The bucket did not carry out the request.

    asks_to_slow_down: the response was a 429, SlowDown or 5xx, so the whole client should send less.
    retry_after_seconds: the wait that the response asked for, if any. code: S3's error code; "" if there was no answer.
    status: of the response; 0 if there was none. remedy: what to do if the bucket sent it: the end of the message.
    """

    asks_to_slow_down: bool = False
    retry_after_seconds: float | None = None
    code: str = ""
    status: int = 0
    remedy: str = ""


class ObjectMissing(RemoteError):
    """The object does not exist (404 NoSuchKey)."""


class BucketMissing(RemoteError):
    """The bucket does not exist (404 NoSuchBucket)."""


class ObjectChanged(RemoteError):
    """The object is no longer the requested version (412, or another ETag in the response)."""


class AccessDenied(RemoteError):
    """The credentials are rejected (401, 403, SignatureDoesNotMatch, …). Counts as permanent only after a while."""


class CredentialsMissing(RemoteError):
    """No credentials were found in the usual places."""


class Unavailable(RemoteError):
    """A transient error, to be retried: 429, 5xx, timeouts, resets, short bodies."""


class Untrusted(Unavailable):
    """The server's certificate is not trusted. Waiting does not help at the start of a mount."""


class Throttled(Unavailable):
    """429 or SlowDown: the whole client should slow down."""

    asks_to_slow_down = True


class NotAsSent(Unavailable):
    """The bucket received other bytes than announced (BadDigest): corrupted on the network, or in this process."""


class UploadLost(RemoteError):
    """The multipart upload is unknown (NoSuchUpload): start it again."""


class Refused(RemoteError):
    """A permanent error: the bucket will never accept this request (EntityTooLarge, 411, a lock policy, …)."""


class ObjectArchived(RemoteError):
    """The object lies in an archive (403 InvalidObjectState): it must be restored before it can be read."""


class PartsRefused(Refused):
    """The bucket cannot assemble the object from these parts (InvalidPart, …). Uploading them again may help."""


# Errors that pass by themselves, or that a person can fix while requests are retried.
TRANSIENT = (Unavailable, AccessDenied, CredentialsMissing, BucketMissing)


# ---- errors of the node


class NoSpace(FusecacheError):
    """The cache limit is reached, or the disk is full, and no clean data is left to evict."""


class LocalDiskError(FusecacheError):
    """The node's own disk failed."""


class StateLost(StateError):
    """The cache directory was removed, or emptied, below the mount that uses it."""


class JournalMapFull(StateError):
    """The journal needs more address space; it can be given more."""


class TooManyFiles(FusecacheError):
    """The daemon, or the system, has no file descriptor left. Temporary: try again."""

    @classmethod
    def at(cls, path: object) -> "TooManyFiles":
        """Return the error for a file that could not be opened."""
        return cls(
            f"{path}: no file descriptor is left; retrying. Raise the limit: LimitNOFILE= or ulimit -n"
        )


class ListingLost(LocalDiskError):
    """The stored rows of a directory are gone. It must be listed again, or its names requested one by one."""


class NotFound(FusecacheError):
    """The name does not exist."""


class AlreadyExists(FusecacheError):
    """The name already exists."""


class NotADirectory(FusecacheError):
    """The path is not a directory."""


class IsADirectory(FusecacheError):
    """The path is a directory, a file is required."""


class NotEmpty(FusecacheError):
    """The directory has entries."""


class ReadOnly(FusecacheError):
    """The mount is read-only."""


class InvalidName(FusecacheError):
    """The name cannot be a key, or the key cannot be a name."""


class NameTooLong(InvalidName):
    """The name, or the key of its path, is longer than allowed."""


class Interrupted(FusecacheError):
    """The calling process is being killed and no longer waits."""


class AcrossDevices(FusecacheError):
    """One of the two names is local-only and the other is published."""


class LinkNotFollowed(FusecacheError):
    """The symlink leads where the mount does not follow: out of it, or anywhere."""


class NotPermitted(FusecacheError):
    """The operation is not supported (a hard link, a device node)."""


class TooLarge(FusecacheError):
    """The file is larger than the bucket supports (4.995 TiB)."""


class Damaged(FusecacheError):
    """Bytes do not match their checksum or their length. No replacement is invented."""
