"""The parts that need torch: the threaded loader, collation, the API of StreamingDataset."""
