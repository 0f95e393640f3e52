"""The write-back queue: the changes that the bucket does not have yet, and their order."""
