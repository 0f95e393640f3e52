"""Access to the bucket: the `Store` protocol and its S3 implementation. Blocking, thread-safe, without trio."""
