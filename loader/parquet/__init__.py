"""Parquet files as datasets, and Templar-style token datasets on them."""
