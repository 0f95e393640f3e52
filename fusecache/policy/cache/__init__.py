"""Decisions of the block cache: what to fetch, prefetch and evict, and how much disk space to reserve."""
