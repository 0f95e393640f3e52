"""Reads with subclasses of the real StreamingDataset, or of our face of it, and tells what their attributes say.

Arguments: the library ("streaming" or "loader.streaming"), two directories of an MDS dataset with a column `id`, and
the names of attributes. Prints a JSON object.
"""

import faulthandler
import importlib
import json
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
from torch.utils.data import DataLoader

from tests.support.real_streaming import import_streaming


def subclasses(library: Any) -> dict[str, type]:
    """Ways in which users change what a sample is."""

    class ByIndex(library.StreamingDataset):  # type: ignore[misc]
        """As llm-foundry's text dataset."""

        def __getitem__(self, which: Any) -> Any:
            sample = super().__getitem__(which)
            return sample if isinstance(sample, list) else {"id": sample["id"], "more": -sample["id"]}

    class ByItem(library.StreamingDataset):  # type: ignore[misc]
        def get_item(self, sample_id: int, retry: int = 7) -> Any:
            return {"id": super().get_item(sample_id, retry)["id"], "asked": int(sample_id)}

    class ByIteration(library.StreamingDataset):  # type: ignore[misc]
        def __iter__(self) -> Iterator[Any]:
            for sample in super().__iter__():
                yield {"twice": 2 * sample["id"]}

    return {"__getitem__": ByIndex, "get_item": ByItem, "__iter__": ByIteration}


def plain(found: Any) -> Any:
    """The same as JSON has it."""
    if isinstance(found, dict):
        return {name: plain(value) for name, value in found.items()}
    if isinstance(found, (list, np.ndarray)):
        return [plain(value) for value in found]
    return found.item() if hasattr(found, "item") else found


def main() -> None:
    """Do all of it."""
    faulthandler.dump_traceback_later(100, exit=True)  # the library's workers were seen to hang once
    warnings.simplefilter("ignore")
    library = import_streaming() if sys.argv[1] == "streaming" else importlib.import_module(sys.argv[1])
    local, second, names = sys.argv[2], sys.argv[3], sys.argv[4].split(",")
    found: dict[str, Any] = {}
    for name, kind in subclasses(library).items():
        dataset = kind(local=local, batch_size=4, shuffle=True)
        ways = [3, -2, np.int64(5), slice(2, 9, 3), slice(-3, None), [1, -1], [[4], [5, 6]], np.array([7, 0])]
        # By workers first: the library's lock cannot be inherited once it was used.
        loaded = [
            {name: value.tolist() for name, value in batch.items()}
            for batch in DataLoader(dataset, batch_size=4, num_workers=2)
        ]
        asked = [plain(dataset[which]) for which in ways]
        found[name] = {"loaded": loaded, "asked": asked, "iterated": plain(list(dataset))}
    streams = [
        library.Stream(local=local, validate_hash="sha1", proportion=0.5),
        library.Stream(local=second, proportion=0.5),
    ]
    for options in ({"local": local, "shuffle": True}, {"streams": streams, "epoch_size": "1k"}):
        dataset = library.StreamingDataset(batch_size=4, **options)
        next(iter(dataset))
        found[f"attributes {sorted(options)}"] = {name: plain(getattr(dataset, name)) for name in names}
    wrong = []
    for options in ({"local": local, "streams": streams}, {"remote": local, "streams": streams}, {}):
        try:
            library.StreamingDataset(batch_size=4, **options)
        except ValueError:
            wrong.append(sorted(options))
    found["refused"] = wrong
    print(json.dumps(found), flush=True)  # noqa: T201 -- the answer to the test


if __name__ == "__main__":
    main()
