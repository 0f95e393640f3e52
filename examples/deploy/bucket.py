"""The bucket of a try.sh, seen without a mount: `dataset SAMPLES`, `keys`, `checkpoints LOG_FOLDER`, `hold`, `release`.

`hold` lets all uploads hang until `release`.
"""

import json
import os
import sys
import sysconfig
import tempfile
from pathlib import Path

import boto3

from examples.demo.prepare import write_dataset
from tests.s3server import Fault, FaultAction
from tests.s3server.process import RemoteControl

CLIENT = boto3.client("s3", endpoint_url=os.environ["AWS_ENDPOINT_URL"], region_name="auto")
BUCKET = os.environ["BUCKET"]


def put_dataset(samples: int) -> None:
    """Put a dataset of this Python's sources below `dataset/`."""
    with tempfile.TemporaryDirectory() as folder:
        write_dataset(Path(folder, "shards"), [Path(sysconfig.get_path("stdlib"))], samples)
        for path in Path(folder, "shards").iterdir():
            CLIENT.upload_file(str(path), BUCKET, f"dataset/{path.name}")


def keys() -> list[str]:
    """Return all keys."""
    pages = CLIENT.get_paginator("list_objects_v2").paginate(Bucket=BUCKET)
    return [row["Key"] for page in pages for row in page.get("Contents", ())]


def check_checkpoints(logs: Path) -> int:
    """Return 0 if the bucket has each checkpoint that a step log names, and there is one."""
    events = [json.loads(line) for file in logs.glob("*.jsonl") for line in file.read_text().splitlines()]
    saved = {event["name"] for event in events if event["event"] == "checkpoint"}
    there = {key.split("/")[-2] for key in keys() if key.endswith("/.metadata")}
    sys.stdout.write(f"        saved: {', '.join(sorted(saved))}; missing: {sorted(saved - there)}\n")
    return int(not saved or bool(saved - there))


def control() -> RemoteControl:
    """Return the control of the server, which said at its start how to reach it."""
    facts = json.loads(Path(os.environ["FACTS"]).read_text())
    address, secret = facts["control"]
    return RemoteControl(address if isinstance(address, str) else tuple(address), bytes.fromhex(secret))


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["dataset", samples]:
            put_dataset(int(samples))
        case ["keys"]:
            sys.stdout.write("".join(f"{key}\n" for key in keys()))
        case ["checkpoints", logs]:
            sys.exit(check_checkpoints(Path(logs)))
        case ["hold"]:
            control().faults(Fault(FaultAction.HOLD, method="P*"))
        case ["release"]:
            control().clear_faults()
        case words:
            sys.exit(f"unknown words {words}; {__doc__}")
