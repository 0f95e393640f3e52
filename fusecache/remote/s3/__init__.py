"""The S3 store: boto3 for what is rare, `remote.http` for object bytes."""
