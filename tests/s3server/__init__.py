"""An S3 server for tests, with Cloudflare R2's rules; README.md says how to use it."""

from tests.s3server.accounts import Account
from tests.s3server.client import boto_client
from tests.s3server.control import Control, ObjectView, UploadView
from tests.s3server.faults import Fault, FaultAction
from tests.s3server.process import ServerProcess
from tests.s3server.request_log import LogEntry
from tests.s3server.rules import Rules, Settings
from tests.s3server.server import S3Server
from tests.s3server.synthetic import synthetic_bytes

__all__ = [
    "Account",
    "Control",
    "Fault",
    "FaultAction",
    "LogEntry",
    "ObjectView",
    "Rules",
    "S3Server",
    "ServerProcess",
    "Settings",
    "UploadView",
    "boto_client",
    "synthetic_bytes",
]
