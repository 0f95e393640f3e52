"""One rank of a Grain pipeline: `python -m tests.serving.grain_rank FOLDER BATCH WORKERS STEPS STATE RANKS RANK`."""

import json
import sys

import grain

from loader import ElasticBatchSampler, MDSDataset, World
from loader.grain import GrainBatches


def main() -> None:
    folder, size, workers, steps, state, ranks, rank = sys.argv[1:]
    dataset = MDSDataset(folder)
    sampler = ElasticBatchSampler(dataset, global_batch_size=int(size), world=World(int(rank), int(ranks)))
    batches = GrainBatches(dataset, sampler, epochs=2)
    pipeline = grain.DataLoader(
        data_source=batches,
        sampler=grain.samplers.SequentialSampler(len(batches), grain.sharding.NoSharding()),
        shard_options=grain.sharding.NoSharding(),
        operations=[Checked()],
        worker_count=int(workers),
        read_options=grain.ReadOptions(num_threads=4, prefetch_buffer_size=4),
    )
    iterator = iter(pipeline)
    if state != "-":
        iterator.set_state(state.encode())
    found = [next(iterator)["id"].tolist() for _ in range(int(steps))]
    print(json.dumps({"batches": found, "state": iterator.get_state().decode()}))  # noqa: T201


class Checked(grain.transforms.Map):
    """Fails unless each sample's tokens are its own."""

    def map(self, batch):  # type: ignore[no-untyped-def]
        assert (batch["tokens"][:, 0] == batch["id"]).all()
        return batch


if __name__ == "__main__":
    main()
