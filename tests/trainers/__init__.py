"""Checkpoints of real trainers, on real mounts: what they leave in the bucket, in which order, and who can resume."""
