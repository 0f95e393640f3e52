"""Rows in LMDB: journal, cache index, listings. Blocking, trio-free."""
