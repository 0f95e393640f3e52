"""Gives keys on Ceph's gateway their rights, for isolation.sh: `ceph_keys KEY:SECRET:read|write:BUCKET…`.

Needs FUSECACHE_TEST_* of the buckets' owner, and CEPH_CONF for radosgw-admin.
"""

import json
import subprocess
import sys
from collections import defaultdict
from contextlib import closing
from typing import Any

import boto3
from botocore.config import Config

from examples.buckets.store import open_store

READS = ("ListBucket", "GetObject")
WRITES = (
    "PutObject", "DeleteObject", "AbortMultipartUpload", "ListMultipartUploadParts", "ListBucketMultipartUploads",
)  # fmt: skip


def main() -> None:
    """Make users and buckets as needed, and replace the policies of the buckets."""
    statements: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for account in sys.argv[1:]:
        key, secret, role, bucket = account.split(":")
        words = ("--uid", key, "--display-name", key, "--access-key", key, "--secret-key", secret)
        if subprocess.run(["radosgw-admin", "user", "info", *words[:2]], capture_output=True).returncode:
            subprocess.run(["radosgw-admin", "user", "create", *words], check=True, capture_output=True)
        actions = READS if role == "read" else READS + WRITES
        statements[bucket].append(
            {
                "Effect": "Allow",
                "Principal": {"AWS": [f"arn:aws:iam:::user/{key}"]},
                "Action": [f"s3:{action}" for action in actions],
                "Resource": [f"arn:aws:s3:::{bucket}", f"arn:aws:s3:::{bucket}/*"],
            }
        )
    with open_store() as owner:
        client = boto3.client(
            "s3",
            endpoint_url=owner.endpoint_url,
            aws_access_key_id=owner.access_key,
            aws_secret_access_key=owner.secret_key,
            region_name="us-east-1",
            config=Config(s3={"addressing_style": "path"}),
        )
        with closing(client):
            for bucket, rules in statements.items():
                client.create_bucket(Bucket=bucket)
                policy = {"Version": "2012-10-17", "Statement": rules}
                client.put_bucket_policy(Bucket=bucket, Policy=json.dumps(policy))
                count = len(client.list_objects_v2(Bucket=bucket).get("Contents", []))
                count += len(client.list_multipart_uploads(Bucket=bucket).get("Uploads", []))
                print(f"{bucket}: {count} objects and uploads")  # noqa: T201


if __name__ == "__main__":
    main()
