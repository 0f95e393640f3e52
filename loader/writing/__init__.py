"""Writes MDS datasets: one writer or many, resumed after a crash, merged, recompressed."""
