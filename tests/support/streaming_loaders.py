"""Reads through a DataLoader, with the real StreamingDataset or with our face of it, as the arguments say.

Arguments: the library ("streaming" or "loader.streaming") and a JSON list of jobs {"local", "options", "workers",
"persistent", "epochs", "stop"}. Prints a JSON list: for each job the batches of ids of each epoch, the state after
`stop` batches of another epoch, and the rest of that epoch, read after the state was loaded by a new dataset.
"""

import importlib
import json
import sys
import warnings
from typing import Any

from tests.support.real_streaming import import_streaming


def run(library: Any, job: dict[str, Any]) -> dict[str, Any]:
    """Read as told."""

    def loader_of(dataset: Any, **more: Any) -> Any:
        size = job["options"]["batch_size"]
        return library.StreamingDataLoader(dataset, batch_size=size, num_workers=job["workers"], **more)

    def dataset_of() -> Any:
        options = dict(job["options"])
        if "streams" in options:
            options["streams"] = [library.Stream(**stream) for stream in options["streams"]]
        return library.StreamingDataset(local=job["local"], **options)

    dataset = dataset_of()
    loader = loader_of(dataset, persistent_workers=job.get("persistent", False))
    epochs = [[batch["id"].tolist() for batch in loader] for _ in range(job["epochs"])]
    iterator = iter(loader)
    begun = [next(iterator)["id"].tolist() for _ in range(job["stop"])]
    state = loader.state_dict()
    size, length = dataset.size, len(dataset)
    del iterator, loader, dataset
    resumed = loader_of(dataset_of())
    resumed.load_state_dict(state)
    rest = [batch["id"].tolist() for batch in resumed]
    return {
        "epochs": epochs, "begun": begun, "state": state, "rest": rest, "after": resumed.state_dict(),
        "size": size, "length": length,
    }  # fmt: skip


def main() -> None:
    """Do all jobs."""
    warnings.simplefilter("ignore")
    library = import_streaming() if sys.argv[1] == "streaming" else importlib.import_module(sys.argv[1])
    print(json.dumps([run(library, job) for job in json.loads(sys.argv[2])]))  # noqa: T201 -- the answer to the test


if __name__ == "__main__":
    main()
