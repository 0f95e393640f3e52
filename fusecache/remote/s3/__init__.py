"""The S3 store: boto3 for rare requests, `remote.http` for object bytes."""
