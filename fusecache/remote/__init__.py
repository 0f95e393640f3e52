"""Access to the bucket: the `Store` protocol and its implementations. Blocking, thread-safe, without trio."""
