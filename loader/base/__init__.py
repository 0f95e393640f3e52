"""Helpers without knowledge of datasets: argument checks, paths, hashing, compression."""
