"""The bucket. Blocking, thread-safe, trio-free."""
