"""Parquet files as datasets, and Templar-style token datasets built on them."""
