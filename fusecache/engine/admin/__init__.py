"""What commands do to the cache: warm up, evict, check, pin."""
