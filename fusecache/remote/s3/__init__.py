"""The S3 store: botocore for rare requests, `remote.http` for object bytes."""
