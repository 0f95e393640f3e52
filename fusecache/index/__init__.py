"""LMDB tables: journal, cache index, listings. Blocking calls, no trio."""
