"""Batch samplers: the samples of each step on each rank, and their resumable state."""
