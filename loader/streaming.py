"""The API of MosaicML's StreamingDataset on top of this loader: `from loader.streaming import StreamingDataset`."""

from loader.torch.streaming import StreamingDataLoader, StreamingDataset
from loader.torch.streaming import StreamingStream as Stream
from loader.writing.streaming_writer import StreamingMDSWriter as MDSWriter

__all__ = ["MDSWriter", "Stream", "StreamingDataLoader", "StreamingDataset"]
