"""torchtitan's data loader over an MDS dataset of tokens; it goes into the config of a trainer.

    config.dataloader = TitanLoader.Config(dataset_path="/data/tokens", column="tokens")

Its state is the sampler's, the same on each rank. So a checkpoint continues on any number of data-parallel ranks, as
long as the local batch size times their number stays the same.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torchtitan.components.dataloader import BaseDataLoader  # type: ignore[import-not-found,unused-ignore]

from loader.errors import DatasetError
from loader.mds.dataset import MDSDataset
from loader.sampling.sampler import ElasticBatchSampler
from loader.torch.loader import Loader
from loader.world import World


class TitanLoader(BaseDataLoader):  # type: ignore[misc,unused-ignore]
    """Yields ({"input": (batch, seq_len)}, labels: (batch, seq_len)), int64; the labels are one token ahead."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):  # type: ignore[misc,unused-ignore]
        """dataset_path: the dataset's directory; column: its tokens, at least seq_len + 1 a sample.

        split, seed and order: as in MDSDataset and ElasticBatchSampler. infinite: go on after the last epoch.
        """

        column: str = "tokens"
        split: str | None = None
        seed: int = 9176  # the sampler's default
        order: str = "py1e"
        infinite: bool = True

    def __init__(
        self,
        config: Config,
        *,
        dp_world_size: int,
        dp_rank: int,
        seq_len: int,
        local_batch_size: int,
        **_: object,
    ) -> None:
        """Called by torchtitan with its ranks and sizes; the tokenizer is not needed.

        Raises DatasetError if there is no dataset, or if its samples are too short.
        """
        if config.dataset_path is None:
            raise DatasetError("no dataset_path: set it to the directory of an MDS dataset of tokens")
        dataset = MDSDataset(config.dataset_path, config.split)
        self._column, self._length, self._is_infinite = config.column, seq_len, config.infinite
        tokens = dataset[0].get(config.column)
        if tokens is None or len(tokens) <= seq_len:
            found = "no" if tokens is None else f"{len(tokens)} tokens in"
            raise DatasetError(
                f"{config.dataset_path}: sample 0 has {found} column {config.column!r}; seq_len {seq_len} needs "
                f"{seq_len + 1}: choose another column, a smaller seq_len, or convert the dataset with longer samples"
            )
        self._loader = Loader(
            dataset,
            ElasticBatchSampler(
                dataset,
                global_batch_size=local_batch_size * dp_world_size,
                order=config.order,
                seed=config.seed,
                world=World.detect(dp_rank=dp_rank, dp_size=dp_world_size),
            ),
        )

    def __iter__(self) -> Iterator[tuple[dict[str, Any], Any]]:
        while True:
            for batch in self._loader:
                tokens = batch[self._column][:, : self._length + 1].long()
                yield {"input": tokens[:, :-1]}, tokens[:, 1:]
            if not self._is_infinite:
                return

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the batches that the trainer received."""
        return self._loader.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue where a state was taken; an empty one is that of a new run. Raises StateError for differences."""
        if state_dict:
            self._loader.load_state_dict(state_dict)
