"""MDS datasets: index, shards, encodings, reading."""
