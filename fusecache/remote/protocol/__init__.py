"""The S3 protocol without I/O: headers, user metadata, signatures, responses."""
