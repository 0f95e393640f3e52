"""Files on the node: buffers, cache files, staging files. Blocking, trio-free."""
