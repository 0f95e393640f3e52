"""Read an MDS dataset with the real mosaicml-streaming and print one JSON line: what came out of it.

    python -m examples.demo.check_streaming FOLDER

A process of its own, as streaming brings much along. Prints {"installed", "crcs"}: crcs[i] is the CRC-32
of the tokens of the sample whose id is i.
"""

import json
import sys
import zlib

from tests.support.real_streaming import import_streaming


def main() -> None:
    """Read every sample in the order of the index."""
    try:
        streaming = import_streaming()
    except ImportError:
        print(json.dumps({"installed": False}))  # noqa: T201 - the answer
        return
    crcs: dict[int, int] = {}
    for sample in streaming.LocalDataset(sys.argv[1]):
        crcs[sample["id"]] = zlib.crc32(sample["tokens"].tobytes())
    in_order = [crcs[number] for number in sorted(crcs)]
    print(json.dumps({"installed": True, "crcs": in_order}))  # noqa: T201 - the answer


if __name__ == "__main__":
    main()
