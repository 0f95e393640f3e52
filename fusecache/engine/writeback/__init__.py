"""The durable queue of changes that the bucket does not have yet."""
