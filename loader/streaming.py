"""The API of MosaicML's StreamingDataset on top of this loader: `from loader.streaming import StreamingDataset`."""

from loader.torch.streaming import Stream, StreamingDataLoader, StreamingDataset

__all__ = ["Stream", "StreamingDataLoader", "StreamingDataset"]
