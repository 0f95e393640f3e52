"""Prefetching by hints and by directory scans."""
