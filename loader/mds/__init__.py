"""MDS datasets: reading, writing, merging, recompressing."""
