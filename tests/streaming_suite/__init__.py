"""MosaicML's own tests of StreamingDataset and its writers, run on `loader.streaming`: `make test-streaming-suite`."""
