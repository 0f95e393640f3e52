"""The API of MosaicML's StreamingDataset on top of this loader: `from loader.streaming import StreamingDataset`."""

from loader.torch.streaming import StreamingDataLoader, StreamingDataset
from loader.torch.streaming_streams import StreamingStream as Stream

__all__ = ["Stream", "StreamingDataLoader", "StreamingDataset"]
