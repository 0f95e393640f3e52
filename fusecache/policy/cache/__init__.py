"""Decisions of the block cache: what to fetch, prefetch, evict, and how much space to reserve."""
