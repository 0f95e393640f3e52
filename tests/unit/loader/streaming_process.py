"""Runs the real StreamingDataset in a process of its own, as it keeps shared memory and lock files.

Arguments: one JSON object {"local", "options", "read", "stop"}; options may have "streams", the arguments of each,
in place of local. Prints a JSON object with what it read: the
`id` of every sample by index or by iteration, the other columns' digest, and the state after `stop` samples.
"""

import hashlib
import json
import sys
import warnings
from typing import Any

from tests.real_streaming import import_streaming


def digest(sample: dict[str, Any]) -> str:
    """A digest of all columns of a sample."""
    parts = [
        f"{name}={getattr(value, 'tolist', lambda v=value: v)()!r}" for name, value in sorted(sample.items())
    ]
    return hashlib.sha256(";".join(parts).encode()).hexdigest()


def main() -> None:
    """Read as told."""
    command = json.loads(sys.argv[1])
    streaming = import_streaming()
    warnings.simplefilter("ignore")
    options = command["options"]
    if "streams" in options:
        options["streams"] = [streaming.Stream(**stream) for stream in options["streams"]]
    else:
        options["local"] = command["local"]
    dataset = streaming.StreamingDataset(**options)
    result: dict[str, Any] = {}
    if command["read"] == "index":
        result["digests"] = [digest(dataset[number]) for number in range(dataset.size)]
    else:
        iterator = iter(dataset)
        result["ids"] = [next(iterator)["id"] for _ in range(command["stop"])]
        result["state"] = dataset.state_dict(command["stop"], from_beginning=True)
        result["rest"] = [sample["id"] for sample in iterator]
    print(json.dumps(result))  # noqa: T201 -- the answer to the test


if __name__ == "__main__":
    main()
