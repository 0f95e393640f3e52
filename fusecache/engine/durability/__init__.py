"""Waiting for the bucket (remote fsync, sync), and the status of the write-back queue."""
